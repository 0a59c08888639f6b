"""I/O loop around dispatch and directory: it feeds them messages, snapshots and time, and performs their actions."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from cluster.channel import AsyncInbox, Outbox
from cluster.logs import with_facts
from cluster.spec.clock import HEARTBEAT_S, Clock
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Peer, Role
from cluster.spec.messages import (
    CheckHealth,
    CommandResult,
    Drain,
    Failure,
    Healthy,
    Inquire,
    KvEvents,
    Message,
    Output,
    Outputs,
    RankTrace,
    Submit,
    SubscribeKvEvents,
)
from cluster.spec.registry import TableSnapshot
from cluster.spec.sampling import FinishReason
from router.answer import Answer, Backlog, OpenChoice
from router.commands import Commands
from router.directory import LOOK_S, Directory
from router.dispatch import RequestTable
from router.errors import NotReadyError, QueueFullError
from router.metrics import Metrics
from router.parity_probe import ParityProbe
from router.picker import Picker
from router.request import (
    Action,
    Cause,
    ChoiceId,
    FailRequest,
    GenerateRequest,
    OutputBatch,
    SendMessage,
    StartAttempt,
    WakeAt,
    peers_of,
)
from router.request_trace import RequestTraces
from router.send_queue import SendQueue

_log = logging.getLogger(__name__)
MAX_UNREAD_LOGPROBS = 1 << 20
"""Maximum number of log-probabilities of all answers together that clients have not read."""
_MOST_AT_ONCE = 64
"""Maximum number of requests that are sent without a break, which takes up to ten milliseconds."""
_FORGET_AFTER_S = 1.0
"""Time to send the last Cancels to a lost replica before its connection is closed."""


class Relay:
    """Connections to the replicas, and the answers in progress. Not thread-safe: all methods run in one event loop."""

    def __init__(
        self,
        config: DeployConfig,
        requests: RequestTable,
        directory: Directory,
        picker: Picker,
        outbox: Outbox,
        clock: Clock,
        metrics: Metrics,
        on_change: Callable[[], None] = lambda: None,
        parity: ParityProbe | None = None,
    ) -> None:
        """Create the loop.

        Args:
            on_change: called whenever replicas may have capacity for a waiting request.
            parity: chooses answers to record; None for none.
        """
        self._request_timeout_s = config.router.request_timeout_s
        self._on_change = on_change
        self._picker = picker
        self._requests = requests
        self._directory = directory
        self._outbox = outbox
        self._sending = SendQueue(outbox, self._on_unreachable)
        self._clock = clock
        self._metrics = metrics
        self._uncounted = Metrics()
        """Metrics of parity probes, which are not exported."""
        self._parity = parity
        self.commands = Commands(requests.me, lambda peer, command: self._sending.send(peer.address, command))
        self.traces = RequestTraces(requests.me.address, self._sending.send)
        self._choices: dict[ChoiceId, OpenChoice] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        """Time of the timer on the event loop's clock. uvloop's handles do not know theirs if it is now."""
        self._backlog = Backlog()
        self._num_clients = 0
        """Number of open answers, apart from those of parity probes."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.drain_asked = asyncio.Event()
        """Set when the driver wants the router to drain."""
        self._is_draining = self._is_paused = False

    def now_s(self) -> float:
        return self._clock.now_s()

    def why_not_ready(self) -> str | None:
        """Return the reason why no request can be accepted now, or None if requests can be accepted."""
        if self.is_paused:
            return "the router is draining and takes no new requests"
        if self._directory.snapshot is None:
            return "the bootstrap service has not answered yet"
        missing = self._directory.missing
        return f"no {' and no '.join(missing)} replica is ready" if missing else None

    def open(self, requests: Sequence[GenerateRequest]) -> Answer:
        """Send each request to its replicas, and return one answer with a choice for every request.

        Raises:
            NotReadyError: the router is draining, or a role has no ready replica.
            QueueFullError: all replicas of a role are full.
        """
        if reason := self.why_not_ready():
            raise NotReadyError(reason)
        now_s = self._clock.now_s()
        if reason := self._picker.why_full(requests, now_s):
            raise QueueFullError(reason)
        self._metrics_of(requests[0]).on_open(requests)
        make = Answer if self._parity is None else self._parity.maker(requests)
        num_clients = int(not requests[0].is_probe)
        answer = make(requests, self._stop_early, partial(self._leave, num_clients), self._backlog)
        answer.opened_s = now_s
        self._count_clients(num_clients)
        self._open_some(answer, 0, None)
        return answer

    def _open_some(self, answer: Answer, begin: int, first: ChoiceId | None) -> None:
        """Send some requests of an answer, and the next ones after other clients' events.

        Args:
            begin: index of the next request.
            first: first choice of the last prompt that was sent.
        """
        if answer.is_left:
            return
        end, deadline_s = begin + _MOST_AT_ONCE, answer.opened_s + self._request_timeout_s
        for index, request in enumerate(answer.requests[begin:end], begin):
            shared = first if request.shares_prompt else None
            choice_id, actions = self._requests.open(request, deadline_s, self._clock.now_s(), shared)
            first = choice_id if shared is None else first
            answer.choice_ids.append(choice_id)
            self._choices[choice_id] = OpenChoice(answer, index, self._metrics_of(request))
            self._perform(actions)
        self._wake_at(deadline_s)
        if end < len(answer.requests):
            asyncio.get_running_loop().call_soon(self._open_some, answer, end, first)

    def _metrics_of(self, request: GenerateRequest) -> Metrics:
        return self._uncounted if request.is_probe else self._metrics

    async def receive(self, inbox: AsyncInbox) -> None:
        while True:
            for message in await inbox.receive():
                self.on_message(message)

    def on_message(self, message: Message) -> None:
        now_s = self._clock.now_s()
        match message:
            case Output():
                self._perform(self._requests.on_output(message, now_s))
            case Outputs():
                for output in message.outputs:
                    self._perform(self._requests.on_output(output, now_s))
            case Failure():
                self._on_failure(message, now_s)
            case Inquire():
                self._perform(self._requests.on_inquire(message))
            case KvEvents():
                if peer := self._picker.pages.on_kv_events(message, now_s):
                    self._subscribe(peer)
            case CommandResult():
                self.commands.on_result(message)
            case RankTrace():
                self.traces.on_part(message)
            case CheckHealth():
                self._sending.send(message.reply_to, Healthy())
            case Drain():
                self.drain_asked.set()
            case _:
                self._requests.dropped["foreign"] += 1
        self._on_change()

    @property
    def watch_s(self) -> float:
        """Maximum time for which the table may keep back an answer if nothing urgent changes."""
        return LOOK_S if self._directory.is_missing_any else HEARTBEAT_S

    def on_table(self, snapshot: TableSnapshot | None) -> None:
        """Handle an answer of the table, None if nothing has changed."""
        now_s = self._clock.now_s()
        before = {*self._directory.peers(*Role)}
        self._give_up(self._directory.update(snapshot, now_s))
        for peer in self._directory.peers(*Role):
            if peer not in before:
                _log.info("a replica joined", extra=with_facts(replica=peer.replica, incarnation=peer.incarnation))
        for peer in self._picker.pages.update(self._directory.peers(*self._picker.prefix_roles), now_s):
            self._subscribe(peer)
        self._on_change()

    async def drain(self) -> None:
        """Refuse new requests and wait until every client's answer has ended."""
        self._is_draining = True
        self._on_change()
        await self._idle.wait()

    def set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._on_change()

    @property
    def is_paused(self) -> bool:
        return self._is_draining or self._is_paused

    @property
    def uses_prefixes(self) -> bool:
        """Return whether ``open`` needs the page keys of prompts."""
        return bool(self._picker.prefix_roles)

    def stop(self) -> None:
        self._is_draining = True
        self._perform(self._requests.stop())
        self._sending.flush()
        if self._timer is not None:
            self._timer.cancel()

    def _stop_early(self, choice_id: ChoiceId) -> None:
        """End a request because a stop string has completed its answer."""
        if self._requests.is_open(choice_id):
            self._perform(self._requests.stop_early(choice_id))
            self._choices[choice_id].end(FinishReason.STOP, self._clock.now_s())

    def _count_clients(self, change: int) -> None:
        self._num_clients += change
        if self._num_clients:
            self._idle.clear()
        else:
            self._idle.set()

    def _leave(self, num_clients: int, choice_ids: Iterable[ChoiceId]) -> None:
        """Forget an answer's choices, and cancel the requests that are still open."""
        self._cancel(choice_ids)
        for choice_id in choice_ids:
            choice = self._choices.pop(choice_id)
            if choice.answer.is_traced:
                self.traces.end(choice_id, choice.intervals(self._clock.now_s()))
        self._count_clients(-num_clients)
        self._on_change()

    def _cancel(self, choice_ids: Iterable[ChoiceId]) -> None:
        for choice_id in choice_ids:
            if self._requests.is_open(choice_id):
                self._perform(self._requests.on_client_left(choice_id))

    def _limit_backlog(self) -> None:
        """Cancel the requests whose clients leave most log-probabilities unread, while these are too many."""
        while self._backlog.total > MAX_UNREAD_LOGPROBS:
            answer = self._backlog.largest
            self._cancel(answer.choice_ids)
            most = f"{MAX_UNREAD_LOGPROBS} unread log-probabilities of all clients together"
            reason = f"the client reads too slowly; allowed: {most}"
            answer.fail(FailRequest(choice_id=answer.choice_ids[0], cause=Cause.UNREAD, reason=reason))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case OutputBatch():
                    self._choices[action.choice_id].take(action, self._clock.now_s())
                    if action.logprobs:
                        self._limit_backlog()
                case StartAttempt():
                    self._start_attempt(action)
                case SendMessage():
                    self._sending.send(action.address, action.message)
                case WakeAt():
                    self._wake_at(action.time_s)
                case FailRequest():
                    if action.cause is not Cause.STOPPED:
                        facts = with_facts(choice=action.choice_id, cause=action.cause.value)
                        _log.warning("a request failed: %s", action.reason, extra=facts)
                    self._choices[action.choice_id].answer.fail(action)

    def _start_attempt(self, action: StartAttempt) -> None:
        answer, submit = self._choices[action.choice_id].answer, action.submit
        answer.submits[action.choice_id] = submit
        if submit.prefill is None and submit.prompt_of is None:
            self._metrics_of(answer.requests[0]).skipped.add(1)
        if answer.is_traced:
            ranks = [record for peer in peers_of(submit) for record in self._directory.ranks(peer)]
            self.traces.begin(action.choice_id, submit.room, ranks)
        for peer in peers_of(submit):
            self._sending.send(peer.address, submit)

    def _on_unreachable(self, address: str, message: Message, reason: str) -> None:
        """Retry a request that could not be sent. Replicas that lost other messages are found by their silence."""
        if isinstance(message, Submit):
            self._perform(self._requests.on_unreachable(message.room, address, reason, self._clock.now_s()))

    def _on_failure(self, failure: Failure, now_s: float) -> None:
        if actions := self._requests.on_failure(failure, now_s):  # none for an attempt that has ended
            facts = with_facts(room=failure.room, replica=failure.replica)
            _log.warning("a replica failed an attempt: %s", failure.reason, extra=facts)
            self._perform(actions)

    def _subscribe(self, peer: Peer) -> None:
        self._sending.send(peer.address, SubscribeKvEvents(router=self._requests.me, incarnation=peer.incarnation))

    def _give_up(self, lost: Iterable[Peer]) -> None:
        for peer in lost:
            _log.warning("a replica is lost", extra=with_facts(replica=peer.replica, incarnation=peer.incarnation))
            self._perform(self._requests.on_lost(peer, self._clock.now_s()))
            asyncio.get_running_loop().call_later(_FORGET_AFTER_S, self._outbox.forget, peer.address)

    def _wake_at(self, when_s: float | None) -> None:
        """Check the deadlines at this time or earlier."""
        if when_s is None:
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + max(when_s - self._clock.now_s(), 0.001)
        if self._timer_s <= due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = loop.call_at(due_s, self._on_time), due_s

    def _on_time(self) -> None:
        self._timer, self._timer_s = None, math.inf
        now_s = self._clock.now_s()
        self._perform(self._requests.expire(now_s))
        self._wake_at(self._requests.next_deadline_s)
