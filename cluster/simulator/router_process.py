"""Process of the router: the loop of ``router.relay`` around the real request table, directory and picker."""

from collections.abc import Callable, Iterable
from functools import partial

from cluster.simulator.bootstrap import Bootstrap
from cluster.simulator.environment import HOME, Environment, Process
from cluster.simulator.memory import Violation
from cluster.simulator.promises import CancelCheck, Client, End
from cluster.simulator.replica import LeaderProcess
from cluster.simulator.scenario import PAGE_SIZE, ClientRequest
from cluster.spec.clock import HEARTBEAT_S, LEASE_S
from cluster.spec.config import DeployConfig
from cluster.spec.errors import BatonError
from cluster.spec.ids import ROUTER, Incarnation, Peer, Role, Room
from cluster.spec.messages import Failure, Inquire, KvEvents, Message, Output, SubscribeKvEvents
from cluster.spec.registry import TableSnapshot
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.wire import TokenIds
from router.directory import Breakers, Directory, LoadBook
from router.dispatch import RequestTable
from router.page_index import PromptKeys
from router.picker import POLICIES, Picker
from router.request import (
    Action,
    Cause,
    ChoiceId,
    FailRequest,
    GenerateRequest,
    OutputBatch,
    SendMessage,
    StartAttempt,
    peers_of,
)

_POLL_S = 0.25
"""Interval between deadline checks."""

_MAX_UNANSWERED = 2

_SESSIONS = ("", "a", "b")


class KnownPages:
    """Cache index of a router, which subscribes to KV events as ``router.relay`` does."""

    def __init__(self, me: Peer, directory: Directory, picker: Picker, send: Callable[[str, Message], None]) -> None:
        self._me, self._directory, self._picker, self._send = me, directory, picker, send

    def on_table(self, now_s: float) -> None:
        for peer in self._picker.pages.update(self._directory.peers(*self._picker.prefix_roles), now_s):
            self._follow(peer)

    def on_kv_events(self, events: KvEvents, now_s: float) -> None:
        """Apply a replica's KV events. Subscribe again if some are missing."""
        if peer := self._picker.pages.on_kv_events(events, now_s):
            self._follow(peer)

    def check(self, leader: LeaderProcess) -> None:
        """Compare the index with a leader's cache if all KV events have arrived."""
        pages, me = self._picker.pages, leader.me
        known, cached = pages.find(me), leader.cached_keys()
        if known is None or known.next_number is None or known.next_number != leader.num_kv_events[self._me.address]:
            return
        keys = set(known.keys)
        # The router forgets a page that several DP ranks have cached when one of them evicts it.
        if not keys <= cached or (keys != cached and leader.record.sizes.dp == 1):
            raise Violation(f"the router has all KV events of {me.replica}, but its index differs from the cache")

    def _follow(self, peer: Peer) -> None:
        self._send(peer.address, SubscribeKvEvents(router=self._me, incarnation=peer.incarnation))


class RouterProcess(Process):
    def __init__(self, env: Environment, bootstrap: Bootstrap, incarnation: Incarnation) -> None:
        super().__init__(env, f"{HOME}/{ROUTER}.{incarnation}")
        me = Peer(replica=ROUTER, incarnation=incarnation, address=self.address)
        config = _config(env)
        self.directory = Directory(grace_s=LEASE_S)
        load, breakers = LoadBook(), Breakers()
        self._picker = picker = Picker(config, self.directory, load, breakers, env.random)
        self.known_pages = KnownPages(me, self.directory, picker, self.send)
        self.requests = RequestTable(
            me,
            load,
            breakers,
            picker.pick,
            lambda: Room(env.random.getrandbits(62) + 1),
            max_unanswered=_MAX_UNANSWERED,
        )
        self._cancel_check = CancelCheck()
        self._first: ChoiceId | None = None
        """Latest request that is the first choice of its prompt."""
        self._first_prompt = b""
        self._clients: dict[ChoiceId, Client] = {}
        self._connected: list[Client] = []
        """Clients whose requests have not been read."""
        self._bootstrap = bootstrap
        self._is_asking = False
        """True while an answer of the bootstrap service is due."""
        self._unwatch = bootstrap.watch(
            HOME, HEARTBEAT_S, lambda snapshot: self.when_running(partial(self._on_table, snapshot))
        )
        self.every(_POLL_S, self._poll)

    @property
    def is_idle(self) -> bool:
        """Return whether no request is open or counted as load."""
        is_open = self._connected or self._clients or self.requests.num_open
        return not is_open and not self.requests.load.lines()

    def kill(self) -> None:
        if self.is_dead:
            return
        super().kill()
        self._unwatch()
        for client in (*self._connected, *self._clients.values()):
            client.finish(End.DISCONNECTED)

    def connect(self, client: Client) -> None:
        self._connected.append(client)
        self.when_running(partial(self._open, client))

    def _open(self, client: Client) -> None:
        self._connected.remove(client)
        if not all(self.directory.ready(role) for role in Role):
            client.finish(End.REFUSED)
            return
        now_s = self.env.now_s()
        request = self._generate_request(client.request)
        is_choice = client.request.is_choice and self._first_prompt == client.request.prompt
        first = self._first if is_choice else None
        deadline_s = now_s + self.env.scenario.request_timeout_s
        choice_id, actions = self.requests.open(request, deadline_s, now_s, first)
        self._first, self._first_prompt = first or choice_id, client.request.prompt
        self._clients[choice_id] = client
        self._perform(actions)
        if client.request.patience_s is not None:
            self.after(client.request.patience_s, partial(self._leave, choice_id))

    def receive(self, message: Message) -> None:
        self.when_running(partial(self._handle, message))

    def _handle(self, message: Message) -> None:
        match message:
            case Output():
                self._cancel_check.note_received(message)
                self._perform(self.requests.on_output(message, self.env.now_s()))
            case Failure():
                self._cancel_check.note_received(message)
                self._perform(self.requests.on_failure(message, self.env.now_s()))
            case Inquire():
                self._perform(self.requests.on_inquire(message))
            case KvEvents():
                self.known_pages.on_kv_events(message, self.env.now_s())

    def _on_table(self, snapshot: TableSnapshot) -> None:
        now_s = self.env.now_s()
        for peer in self.directory.update(snapshot, now_s):
            self._perform(self.requests.on_lost(peer, now_s))
        self.known_pages.on_table(now_s)

    def _poll(self) -> None:
        now_s = self.env.now_s()
        self._perform(self.requests.expire(now_s))
        if self.directory.is_missing_any and not self._is_asking:
            self._is_asking = True
            self._bootstrap.call(HOME, lambda *_: None, self._on_answer)

    def _on_answer(self, error: BatonError | None) -> None:
        self._is_asking = False
        snapshot = self._bootstrap.snapshot()
        if error is None and snapshot is not None:
            self.when_running(partial(self._on_table, snapshot))

    def _leave(self, choice_id: ChoiceId) -> None:
        if self.requests.is_open(choice_id):
            self._perform(self.requests.on_client_left(choice_id))
            self._finish(choice_id, End.LEFT)

    def _generate_request(self, request: ClientRequest) -> GenerateRequest:
        prompt_ids = TokenIds.of(request.prompt)
        return GenerateRequest(
            prompt_ids=prompt_ids,
            sampling=Sampling(),
            stopping=Stopping(max_tokens=request.max_tokens),
            session_id=self.env.random.choice(_SESSIONS),
            dp_rank=request.dp_rank,
            page_keys=PromptKeys(prompt_ids, PAGE_SIZE, "") if self._picker.prefix_roles else None,
        )

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case StartAttempt():
                    submit, peers = action.submit, peers_of(action.submit)
                    names = (peer.replica for peer in peers)
                    self.env.trace.add("request", action.choice_id, "in room", submit.room, "of", *names)
                    self.env.submits[submit.room] = submit
                    for peer in peers:
                        self._cancel_check.note_sent(peer.address, submit)
                        self.send(peer.address, submit)
                case SendMessage():
                    self._cancel_check.note_sent(action.address, action.message)
                    self.send(action.address, action.message)
                case OutputBatch():
                    self._pass_on(action)
                case FailRequest():
                    if action.cause is Cause.TIMED_OUT and self.env.scenario.is_lossy:
                        raise Violation(f"a deadline ended a request that replicas could have served: {action.reason}")
                    self._finish(action.choice_id, End.FAILED, f"{action.cause}: {action.reason}")
        self.requests.check_integrity()
        self._cancel_check.check(self.requests.is_under_way)

    def _pass_on(self, batch: OutputBatch) -> None:
        client = self._clients[batch.choice_id]
        enough = client.request.enough
        wanted = batch.token_ids if enough is None else batch.token_ids[: enough - len(client.tokens)]
        client.receive(wanted)
        if batch.finish is not None:
            self._finish(batch.choice_id, End.FINISHED)
        elif len(client.tokens) == enough:
            self._perform(self.requests.stop_early(batch.choice_id))
            self._finish(batch.choice_id, End.FINISHED)

    def _finish(self, choice_id: ChoiceId, end: End, reason: str = "") -> None:
        self.env.trace.add("request", choice_id, end, reason)
        self._clients.pop(choice_id).finish(end, reason)


def _config(env: Environment) -> DeployConfig:
    policies = {f"{role}_policy": env.random.choice(sorted(POLICIES)) for role in Role}
    prefill = {"skip_below_tokens": env.shape.skip_below_tokens}
    kv = {"page_size": PAGE_SIZE, "prefix_cache": env.shape.prefix_cache}
    return DeployConfig.model_validate({"kv": kv, "prefill": prefill, "router": policies})
