"""One start of the router: the loop of ``router.relay`` around the real dispatch, directory and picker."""

from collections.abc import Iterable
from functools import partial

from cluster.simulator.bootstrap import LEASE_S, Bootstrap
from cluster.simulator.client import Client, End
from cluster.simulator.memory import Violation
from cluster.simulator.network import HOME
from cluster.simulator.process import Process
from cluster.simulator.promises import Duties, KnownPages
from cluster.simulator.scenario import PAGE_SIZE, Ask
from cluster.simulator.surroundings import Surroundings
from cluster.spec.config import DeployConfig
from cluster.spec.ids import ROUTER, Incarnation, Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Failure, Inquire, Message, Output, PageNews, Submit
from cluster.spec.peer import Peer
from cluster.spec.registry import TableSnapshot
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.token_ids import TokenIds
from router.actions import Action, Cause, Emit, Fail, Place, Send, Wait
from router.breaker import Breakers
from router.directory import Directory
from router.dispatch import Dispatch
from router.flight import Ask as RouterAsk
from router.load import LoadBook
from router.picker import Picker
from router.policies.registry import POLICIES
from router.prefix_keys import PromptKeys

_LOOK_S = 0.25
"""How often deadlines are looked at."""

_SESSIONS = ("", "a", "b")


class RouterProcess(Process):
    """Sends requests to pairs of replicas and their tokens to clients."""

    def __init__(self, around: Surroundings, bootstrap: Bootstrap, incarnation: Incarnation) -> None:
        super().__init__(around, f"{HOME}/{ROUTER}.{incarnation}")
        me = Peer(replica=ROUTER, incarnation=incarnation, address=self.address)
        config = _config(around)
        self.directory = Directory(grace_s=LEASE_S)
        load, breakers = LoadBook(), Breakers(config.router.breaker_failures, config.router.breaker_s)
        self._picker = picker = Picker(config, self.directory, load, breakers, around.random)
        self.known_pages = KnownPages(me, self.directory, picker, self.send)
        self.dispatch = Dispatch(me, config.router, load, breakers, picker.pair, self._draw_room)
        self._duties = Duties()
        self._first: Room | None = None
        """The newest request that is no further choice."""
        self._first_prompt = b""
        self._clients: dict[Room, Client] = {}
        """By open request."""
        self._unwatch = bootstrap.watch(HOME, self._on_table)
        self.every(_LOOK_S, self._look)

    @property
    def is_idle(self) -> bool:
        """No request is open, and none is counted anywhere."""
        return not self._clients and not self.dispatch.num_open and not self.dispatch.load.lines()

    @property
    def num_again(self) -> int:
        """Attempts after the first one of a request."""
        return self.dispatch.num_retries + self.dispatch.num_continuations

    def kill(self) -> None:
        """Die; whoever waits loses its connection."""
        if self.is_dead:
            return
        super().kill()
        self._unwatch()
        for client in self._clients.values():
            client.finish(End.DISCONNECTED)

    def open(self, client: Client) -> None:
        """A client sends its request."""
        if not all(self.directory.ready(role) for role in Role):
            client.finish(End.REFUSED)
            return
        now_s = self.around.now_s()
        ask = self._request(client.ask)
        is_choice = client.ask.is_choice and self._first_prompt == client.ask.prompt
        first = self._first if is_choice else None
        room, actions = self.dispatch.open(ask, now_s + self.around.scenario.request_timeout_s, now_s, first)
        self._first, self._first_prompt = first or room, client.ask.prompt
        self._clients[room] = client
        self._perform(actions)
        if client.ask.patience_s is not None:
            self.after(client.ask.patience_s, partial(self._leave, room))

    def take(self, message: Message) -> None:
        """A replica said something."""
        match message:
            case Output():
                self._duties.note_heard(message)
                self._perform(self.dispatch.on_output(message, self.around.now_s()))
            case Failure():
                self._duties.note_heard(message)
                self._perform(self.dispatch.on_failure(message, self.around.now_s()))
            case Inquire():
                self._perform(self.dispatch.on_inquire(message))
            case PageNews():
                self.known_pages.on_news(message, self.around.now_s())

    def _on_table(self, snapshot: TableSnapshot) -> None:
        self._give_up(self.directory.update(snapshot, self.around.now_s()))
        self.known_pages.on_table(self.around.now_s())

    def _look(self) -> None:
        now_s = self.around.now_s()
        self._perform(self.dispatch.expire(now_s))
        self._give_up(self.directory.expire(now_s))

    def _give_up(self, lost: Iterable[Peer]) -> None:
        for peer in lost:
            self._perform(self.dispatch.on_lost(peer, self.around.now_s()))

    def _leave(self, room: Room) -> None:
        if self.dispatch.is_open(room):
            self._perform(self.dispatch.on_client_left(room))
            self._finish(room, End.LEFT)

    def _request(self, ask: Ask) -> RouterAsk:
        prompt_ids = TokenIds.of(ask.prompt)
        return RouterAsk(
            prompt_ids=prompt_ids,
            sampling=Sampling(),
            stopping=Stopping(max_tokens=ask.max_tokens),
            session=self.around.random.choice(_SESSIONS),
            dp_rank=ask.dp_rank,
            page_keys=PromptKeys(prompt_ids, PAGE_SIZE, "") if self._picker.prefix_roles else None,
        )

    def _draw_room(self) -> Room:
        return Room(self.around.random.getrandbits(62) + 1)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    if isinstance(action.message, Submit):
                        self.around.submits[action.message.room] = action.message
                    self._duties.note_sent(action)
                    self.send(action.address, action.message)
                case Place():
                    legs = (leg.replica for leg in action.pair.legs)
                    self.around.trace.add("request", action.room, "in room", action.attempt, "of", *legs)
                case Wait():
                    pass  # it looks often enough
                case Emit():
                    self._emit(action)
                case Fail():
                    if action.cause is Cause.TIMED_OUT and self.around.scenario.is_lossy:
                        raise Violation(f"a deadline ended what replicas could have served: {action.reason}")
                    self._finish(action.room, End.FAILED, f"{action.cause}: {action.reason}")
        self.dispatch.check_integrity()
        self._duties.check(self.dispatch.is_under_way)

    def _emit(self, action: Emit) -> None:
        client = self._clients[action.room]
        enough = client.ask.enough
        wanted = action.token_ids if enough is None else action.token_ids[: enough - len(client.tokens)]
        client.take(wanted)
        if action.finish is not None:
            self._finish(action.room, End.FINISHED)
        elif len(client.tokens) == enough:
            self._perform(self.dispatch.on_enough(action.room))
            self._finish(action.room, End.FINISHED)

    def _finish(self, room: Room, end: End, reason: str = "") -> None:
        self.around.trace.add("request", room, end, reason)
        self._clients.pop(room).finish(end, reason)


def _config(around: Surroundings) -> DeployConfig:
    policies = {f"{role}_policy": around.random.choice(sorted(POLICIES)) for role in Role}
    prefill = {"skip_below_tokens": around.shape.skip_below_tokens}
    kv = {"page_size": PAGE_SIZE, "prefix_cache": around.shape.prefix_cache}
    return DeployConfig.model_validate({"kv": kv, "prefill": prefill, "router": policies})
