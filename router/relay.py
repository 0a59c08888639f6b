"""The loop around dispatch and directory: moves messages, snapshots and time in, and carries their actions out."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence

from cluster.channel import Outbox
from cluster.logs import with_facts
from cluster.spec.clock import Clock
from cluster.spec.config import DeployConfig
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.messages import (
    CommandTaken,
    Failure,
    FollowPages,
    Gathered,
    Inquire,
    Message,
    Output,
    Outputs,
    PageNews,
    Submit,
    Timeline,
)
from cluster.spec.peer import Peer
from cluster.spec.registry import TableSnapshot
from cluster.spec.sampling import FinishReason
from cluster.spec.step_messages import GiveTimeline
from router.actions import Action, Cause, Emit, Fail, Place, Send, Wait
from router.answer import Answer
from router.commands import Commands
from router.directory import Directory
from router.dispatch import Dispatch
from router.errors import NotReadyError, QueueFullError
from router.flight import Ask
from router.metrics import Metrics
from router.picker import Picker
from router.policies.candidate import Load
from router.progress import Progress
from router.siblings import Siblings
from router.timelines import Timelines

_log = logging.getLogger(__name__)
_FORGET_AFTER_S = 1.0
"""Time for the last Cancels to leave for a replica that is lost."""


class Relay:
    """Belongs to one event loop; every method is called from it."""

    def __init__(
        self,
        config: DeployConfig,
        dispatch: Dispatch,
        directory: Directory,
        picker: Picker,
        outbox: Outbox,
        clock: Clock,
        metrics: Metrics,
        siblings: Siblings,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_room`` is called when a request for which there was no room may find some."""
        self._request_timeout_s = config.router.request_timeout_s
        self._max_unread_tokens = config.router.max_unread_tokens
        self._on_room = on_room
        self._picker = picker
        self._dispatch = dispatch
        self._directory = directory
        self._outbox = outbox
        self._clock = clock
        self._metrics = metrics
        self._siblings = siblings
        self.commands = Commands(dispatch.me, lambda peer, command: self._tell(peer.address, command))
        self.timelines = Timelines(dispatch.me.address, self._tell, lambda: siblings.timed)
        self._progress: dict[Room, Progress] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._num_answers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def now_s(self) -> float:
        """The time that arrivals are given in."""
        return self._clock.now_s()

    def why_not_ready(self) -> str | None:
        """What is missing before a request can be taken; None when nothing is."""
        if self.is_paused:
            return "the router is draining and takes no new requests"
        if self._directory.snapshot is None:
            return "the bootstrap service has not answered yet"
        missing = self._directory.missing
        return f"no {' and no '.join(missing)} replica is ready" if missing else None

    def open(self, asks: Sequence[Ask], arrived_s: float) -> Answer:
        """Send each ask to a pair of replicas, or to the decode replica of the ask whose prompt it shares.

        Their answers come as the choices of one.

        Raises:
            NotReadyError: the router drains, or a role has no ready replica.
            QueueFullError: every replica of a role has as many tokens before it as it may have.
        """
        if reason := self.why_not_ready():
            raise NotReadyError(reason)
        opened_s = self._clock.now_s()
        if reason := self._picker.why_full(asks, opened_s):
            raise QueueFullError(reason)
        self._metrics.on_open(asks)
        answer = Answer(len(asks), self._enough, self._leave)
        self._num_answers += 1
        self._idle.clear()
        deadline_s = opened_s + self._request_timeout_s
        first: Room | None = None
        for index, ask in enumerate(asks):
            room, actions = self._dispatch.open(ask, deadline_s, opened_s, first if ask.shares_prompt else None)
            if not ask.shares_prompt:
                first = room
            answer.add(room, timed=ask.timed)
            prompt_len = 0 if ask.shares_prompt else len(ask.prompt_ids)
            self._progress[room] = Progress(answer, index, prompt_len, arrived_s, opened_s, self._metrics)
            self._perform(actions)
        self._siblings.tell()
        self._wake_at(deadline_s)
        return answer

    def on_message(self, message: Message) -> None:
        """A replica said something, or another router process."""
        match message:
            case Output():
                self._perform(self._dispatch.on_output(message, self._clock.now_s()))
            case Outputs():
                now_s = self._clock.now_s()
                for output in message.outputs:
                    self._perform(self._dispatch.on_output(output, now_s))
            case Failure():
                _log.warning(
                    "a leg failed: %s", message.reason, extra=with_facts(room=message.room, replica=message.replica)
                )
                self._perform(self._dispatch.on_failure(message, self._clock.now_s()))
            case Inquire():
                self._perform(self._dispatch.on_inquire(message))
            case PageNews():
                self._on_page_news(message)
            case CommandTaken():
                self.commands.on_taken(message)
            case Timeline():
                self.timelines.on_timeline(message)
            case GiveTimeline():
                self.timelines.on_ask(message)
            case Gathered():
                self.timelines.on_gathered(message)
            case _:
                self._dispatch.dropped["foreign"] += 1
        self._on_room()

    def on_table(self, snapshot: TableSnapshot) -> None:
        """The bootstrap table changed."""
        now_s = self._clock.now_s()
        self._give_up(self._directory.update(snapshot, now_s))
        for peer in self._picker.pages.update(self._directory.peers(*self._picker.prefix_roles), now_s):
            self._follow_pages(peer)
        self._on_room()
        self._wake_at(self._directory.next_deadline_s)

    async def drain(self) -> None:
        """Take no new requests and wait until every answer was read to its end."""
        self._draining = True
        self._on_room()
        await self._idle.wait()

    def pause(self) -> None:
        """Take no new requests, at no router process."""
        self._siblings.is_paused = True
        self._on_room()

    def resume(self) -> None:
        """Take new requests again."""
        self._siblings.is_paused = False

    def load_lines(self) -> dict[tuple[ReplicaId, Incarnation], Load]:
        """What this and the other router processes have open at each replica that has anything open."""
        lines = self._dispatch.load.lines()
        for key, other in self._siblings.loads.items():
            lines[key] = lines[key].plus(other) if key in lines else other
        return lines

    @property
    def uses_prefixes(self) -> bool:
        """Whether the page keys of prompts are of any use to ``open``."""
        return bool(self._picker.prefix_roles)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._dispatch.num_open

    @property
    def is_paused(self) -> bool:
        """No new requests are taken."""
        return self._draining or self._siblings.is_paused

    def stop(self) -> None:
        """Fail what is open."""
        self._draining = True
        self._perform(self._dispatch.stop())
        if self._timer is not None:
            self._timer.cancel()

    def _enough(self, room: Room) -> None:
        """The answer is complete before the model ended it."""
        if self._dispatch.is_open(room):
            self._perform(self._dispatch.on_enough(room))
            self._progress[room].end(FinishReason.STOP, self._clock.now_s())

    def _leave(self, rooms: Iterable[Room]) -> None:
        """Nobody reads these any more; what is still open is cancelled."""
        for room in rooms:
            if self._dispatch.is_open(room):
                self._perform(self._dispatch.on_client_left(room))
            progress = self._progress.pop(room)
            if self.timelines.has(room):
                self.timelines.end(room, progress.intervals(self._clock.now_s()))
        self._num_answers -= 1
        if not self._num_answers:
            self._idle.set()
        self._on_room()

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Emit():
                    progress = self._progress[action.room]
                    progress.emit(action, self._clock.now_s())
                    if progress.num_unread > self._max_unread_tokens:
                        self._end_slow_reader(action.room, progress.num_unread)
                case Send():
                    self._send(action)
                case Place():
                    self._place(action)
                case Wait():
                    self._wake_at(action.until_s)
                case Fail():
                    if action.cause is not Cause.STOPPED:
                        facts = with_facts(room=action.room, cause=action.cause.value)
                        _log.warning("a request failed: %s", action.reason, extra=facts)
                    self._progress[action.room].stream.fail(action)

    def _place(self, place: Place) -> None:
        progress = self._progress[place.room]
        progress.answer.place(place.room, place.pair)
        if place.pair.computes == place.pair.decode:
            self._metrics.skipped.add(1)
        if progress.answer.is_timed:
            ranks = [row for leg in place.pair.legs for row in self._directory.rows(leg)]
            self.timelines.begin(place.room, place.attempt, ranks)

    def _on_page_news(self, news: PageNews) -> None:
        if self._picker.pages.on_news(news, self._clock.now_s()):
            for peer in self._directory.peers(*self._picker.prefix_roles):
                if (peer.replica, peer.incarnation) == (news.replica, news.incarnation):
                    self._follow_pages(peer)

    def _follow_pages(self, peer: Peer) -> None:
        self._tell(peer.address, FollowPages(router=self._dispatch.me, incarnation=peer.incarnation))

    def _end_slow_reader(self, room: Room, num_unread: int) -> None:
        if self._dispatch.is_open(room):
            limit = f"allowed: {self._max_unread_tokens} (router.max_unread_tokens)"
            self._perform(self._dispatch.on_slow_reader(room, f"{num_unread} tokens were left unread; {limit}"))

    def _send(self, action: Send) -> None:
        try:
            self._outbox.send(action.address, action.message)
        except PeerUnreachableError as error:
            if isinstance(action.message, Submit):
                room, now_s = action.message.room, self._clock.now_s()
                self._perform(self._dispatch.on_unreachable(room, action.address, str(error), now_s))

    def _tell(self, address: str, message: Message) -> None:
        with contextlib.suppress(PeerUnreachableError):
            self._outbox.send(address, message)

    def _give_up(self, lost: Iterable[Peer]) -> None:
        for peer in lost:
            _log.warning("a replica is lost", extra=with_facts(replica=peer.replica, incarnation=peer.incarnation))
            self._perform(self._dispatch.on_lost(peer, self._clock.now_s()))
            asyncio.get_running_loop().call_later(_FORGET_AFTER_S, self._outbox.forget, peer.address)

    def _wake_at(self, when_s: float | None) -> None:
        """Look at the deadlines then, if not sooner."""
        if when_s is None:
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + max(when_s - self._clock.now_s(), 0.001)
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now_s = self._clock.now_s()
        self._perform(self._dispatch.expire(now_s))
        self._give_up(self._directory.expire(now_s))
        self._wake_at(self._dispatch.next_deadline_s)
        self._wake_at(self._directory.next_deadline_s)
