"""Life cycle of every open request, sans I/O: events in, actions out. ``router.relay`` is the loop around it.

1. ``open`` draws a room and sends the same Submit to the prefill and the decode leader. This is one attempt.
2. The decode leader's outputs are passed on to the client. The first one means that prefill is done.
3. A failed attempt is followed by another one in a new room, on other replicas if possible. It carries the tokens that
   the client has received, and continues after them.
4. The request ends with the last Output, too many failures, a client that leaves, or the deadline. Every replica that
   may still be working on it gets a Cancel, and its state is deleted.

Messages can be lost, so the router repeatedly asks decode leaders about attempts that have been silent for a while.
Being silent is no evidence of failure, because long prompts take a long time. But leaders ask the router about their
attempts too. If decode has not named an attempt during many inquiries, the two cannot hear each other, and the attempt
has failed. Counting inquiries instead of seconds excludes the time for which the router itself was stalled.
"""

import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from cluster.spec.errors import move
from cluster.spec.ids import Peer, Room
from cluster.spec.messages import INQUIRE_EVERY_S, Blame, Cancel, Failure, Inquire, Output
from cluster.spec.tiers import CachedTokens
from router.directory import Breakers, LoadBook
from router.request import (
    ENDS,
    MOVES,
    Action,
    Cause,
    ChoiceId,
    FailRequest,
    GenerateRequest,
    OutputBatch,
    Pick,
    Placement,
    RequestPhase,
    SendMessage,
    StartAttempt,
    WakeAt,
    peers_of,
)

_NO_TOKENS = CachedTokens()
MAX_RETRIES = 3
"""Maximum number of retries of a request. One that fails on four pairs of replicas is probably the cause itself."""
RETRY_BACKOFF_S = 0.1
"""Delay before the second retry, doubled for each further one. The first retry is immediate: it uses other replicas."""


def draw_room() -> Room:
    """Draw a fresh room, uniform over [1, 2**63)."""
    return Room(secrets.randbits(63) or 1)


def max_unanswered(step_timeout_s: float) -> int:
    """Return the number of inquiries without a sign after which decode is unreachable rather than busy with a step."""
    return math.ceil(step_timeout_s / INQUIRE_EVERY_S) + 2


class RequestTable:
    """Open requests of one router process, with their attempts. The picker reads the load that the table counts."""

    def __init__(
        self,
        me: Peer,
        load: LoadBook,
        breakers: Breakers,
        pick: Pick,
        draw: Callable[[], Room] = draw_room,
        max_retries: int = MAX_RETRIES,
        retry_backoff_s: float = RETRY_BACKOFF_S,
        *,
        max_unanswered: int,
    ) -> None:
        """Start without requests. ``load`` and ``breakers`` are updated here and read by ``pick``.

        Args:
            max_unanswered: number of inquiries during which decode may give no sign of an attempt.
        """
        self.me = me
        self.load = load
        self.breakers = breakers
        self._max_retries = max_retries
        self._retry_backoff_s = retry_backoff_s
        self._max_unanswered = max_unanswered
        self._pick = pick
        self._draw = draw
        self._open: dict[ChoiceId, GenerateRequest] = {}
        self._by_room: dict[Room, GenerateRequest] = {}
        """Requests by the room of their current attempt."""
        self._inquire_s = 0.0
        """Time of the next inquiry about silent attempts; valid while there are attempts."""
        self.dropped: Counter[str] = Counter()
        """Number of ignored messages, by reason: ``late``, ``foreign`` (unexpected sender or type) or ``duplicate``."""
        self.ended: Counter[RequestPhase] = Counter()
        self.num_restarts = 0
        """Number of attempts that restarted a request from its beginning."""
        self.num_continuations = 0
        """Number of attempts that continued after tokens that the client already had."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def next_deadline_s(self) -> float | None:
        """Earliest time at which ``expire`` may have something to do."""
        if not self._open:
            return None
        inquire_s = self._inquire_s if self._by_room else math.inf
        return min(inquire_s, min(request.wake_at_s for request in self._open.values()))

    def is_open(self, choice_id: ChoiceId) -> bool:
        return choice_id in self._open

    def is_under_way(self, room: Room) -> bool:
        return room in self._by_room

    def open(
        self, request: GenerateRequest, deadline_s: float, now_s: float, first_choice: ChoiceId | None = None
    ) -> tuple[ChoiceId, list[Action]]:
        """Start a request. It shares the prompt's KV with ``first_choice``, if given."""
        room = self._draw()
        choice_id = ChoiceId(room)
        assert choice_id not in self._open, f"room {room} drawn twice"
        request.choice_id, request.deadline_s = choice_id, deadline_s
        self._open[choice_id] = request
        first = self._open.get(first_choice) if first_choice is not None else None
        return choice_id, self._begin(request, room, now_s, first)

    def on_output(self, output: Output, now_s: float) -> list[Action]:
        request = self._by_room.get(output.room)
        if request is None:
            return self._drop("late")
        if not request.is_decode(output.replica, output.incarnation):
            return self._drop("foreign")
        request.last_output_s, request.num_unanswered = now_s, 0
        if problem := request.problem(output):
            reason = f"{output.replica}: {problem}"
            return self._retry(request, Cause.BROKEN_OUTPUT, reason, request.peers[-1:], request.peers, now_s)
        num_known = len(request.output_ids) - output.first_index
        token_ids = output.token_ids[num_known:]
        if not token_ids and output.finish is None:
            return self._drop("duplicate")
        is_first = not request.output_ids
        if request.phase is RequestPhase.WAITING:
            self._end_prefill(request)
            self._move(request, RequestPhase.STREAMING, "first output")
        request.output_ids += token_ids
        if output.finish is not None:
            self.breakers.forget(request.peers[-1])
            self._end(request, RequestPhase.FINISHED, "last output", [])
        return [
            OutputBatch(
                choice_id=request.choice_id,
                token_ids=token_ids,
                finish=output.finish,
                logprobs=output.logprobs[num_known:],
                prompt_logprobs=output.prompt_logprobs if is_first else [],
                cached=output.cached if is_first else _NO_TOKENS,
                phases=output.phases if is_first else None,
            )
        ]

    def on_failure(self, failure: Failure, now_s: float) -> list[Action]:
        """Handle one replica's failure: cancel the attempt at the other replica, and retry the request."""
        request = self._by_room.get(failure.room)
        if request is None:
            return self._drop("late")
        sender = failure.replica, failure.incarnation
        failed = next((peer for peer in request.peers if (peer.replica, peer.incarnation) == sender), None)
        if failed is None:
            return self._drop("foreign")
        if failed not in request.waiting_for:
            return self._drop("late")
        reason = f"{failure.replica}: {failure.reason}"
        others = [peer for peer in request.peers if peer is not failed]
        if not failure.retryable:
            cause = Cause.CORRUPTED if failure.blame is Blame.MODEL else Cause.REFUSED
            return self._fail(request, cause, reason, others)
        blamed = {Blame.SENDER: [failed], Blame.BOTH: request.peers, Blame.NEITHER: []}[failure.blame]
        return self._retry(request, Cause.REPLICA_FAILED, reason, blamed, others, now_s)

    def on_lost(self, peer: Peer, now_s: float) -> list[Action]:
        """Retry a lost replica's requests. The replica still gets Cancels, because it may have lost only its lease."""
        actions: list[Action] = []
        for request in list(self._open.values()):
            if peer in request.waiting_for:
                reason = f"{peer.replica} was lost before the answer was complete"
                actions += self._retry(request, Cause.REPLICA_LOST, reason, [peer], request.peers, now_s)
        self.breakers.forget(peer)
        return actions

    def on_unreachable(self, room: Room, address: str, reason: str, now_s: float) -> list[Action]:
        """Handle a Submit that could not be sent."""
        request = self._by_room.get(room)
        if request is None:
            return []
        blamed = [peer for peer in request.peers if peer.address == address]
        return self._retry(request, Cause.REPLICA_LOST, reason, blamed, request.peers, now_s)

    def on_inquire(self, inquire: Inquire) -> list[Action]:
        """Cancel those attempts in a leader's inquiry that have ended. The others are a sign that decode has them."""
        if inquire.incarnation != self.me.incarnation:
            return self._drop("foreign")
        sender = inquire.sender
        for request in filter(None, map(self._by_room.get, inquire.rooms)):
            if request.is_decode(sender.replica, sender.incarnation):
                request.num_unanswered = 0
        return [_cancel(sender, room) for room in inquire.rooms if room not in self._by_room]

    def on_client_left(self, choice_id: ChoiceId) -> list[Action]:
        request = self._open[choice_id]
        return self._end(request, RequestPhase.CANCELLED, "client left", request.peers)

    def stop_early(self, choice_id: ChoiceId) -> list[Action]:
        """Finish a request because a stop string has completed its answer."""
        request = self._open[choice_id]
        if request.submit is not None:
            self.breakers.forget(request.submit.decode)
        return self._end(request, RequestPhase.FINISHED, "stop string", request.peers)

    def expire(self, now_s: float) -> list[Action]:
        """Fail requests past their deadline, start retries that are due, and inquire about silent attempts."""
        actions: list[Action] = []
        for request in [request for request in self._open.values() if request.wake_at_s <= now_s]:
            if request.deadline_s <= now_s:
                reason = f"not finished before its deadline (router.request_timeout_s): {request.status}"
                actions += self._fail(request, Cause.TIMED_OUT, reason, request.peers)
            else:
                actions += self._begin(request, self._draw(), now_s)
        return actions + self._inquire(now_s)

    def stop(self) -> list[Action]:
        return [
            action
            for request in list(self._open.values())
            for action in self._fail(request, Cause.STOPPED, "the router is stopping", request.peers)
        ]

    def check_integrity(self) -> None:
        """Assert that every open request is in an open phase, and has an attempt unless it is pending."""
        for choice_id, request in self._open.items():
            assert choice_id == request.choice_id, f"request {request.choice_id} is filed under {choice_id}"
            assert request.phase not in ENDS, f"request {choice_id} is {request.phase.name} and still open"
            is_pending = request.phase is RequestPhase.PENDING
            assert (request.submit is None) == is_pending, f"request {choice_id}: {request.phase.name}"
        under_way = {request.submit.room: request for request in self._open.values() if request.submit is not None}
        assert self._by_room == under_way, f"attempts {self._by_room.keys()} are not {under_way.keys()}"
        expected = LoadBook()
        for request in under_way.values():
            assert request.submit is not None
            if request.phase is RequestPhase.WAITING and request.submit.prefill is not None:
                expected.add(request.submit.prefill, request.prefill_len, request.tenant)
            expected.add(request.submit.decode, request.decode_len, request.tenant)
        assert self.load.lines() == expected.lines(), f"load {self.load.lines()} is not {expected.lines()}"

    def _begin(
        self, request: GenerateRequest, room: Room, now_s: float, first: GenerateRequest | None = None
    ) -> list[Action]:
        """Start an attempt, or fail the request if a role has no ready replica."""
        shared = first.submit if first is not None else None
        if shared is not None:
            placement: Placement | None = Placement(prefill=None, decode=shared.decode)
        else:
            placement = self._pick(request, room, request.avoided, now_s)
        if placement is None:
            after = f" for another attempt: {request.reason}" if request.reason else ""
            return self._fail(request, Cause.NO_REPLICA, f"no replica is ready{after}", [])
        assert room not in self._by_room, f"room {room} drawn twice"
        self._by_room[room] = request
        submit = request.make_submit(room, placement, shared.room if shared is not None else None, self.me)
        request.submit, request.last_output_s = submit, now_s
        request.cached_tokens, request.known = placement.cached_tokens, placement.known
        request.num_unanswered = 0
        self._move(request, RequestPhase.WAITING, "attempt")
        if submit.prefill is not None:
            self.load.add(submit.prefill, request.prefill_len, request.tenant)
        self.load.add(submit.decode, request.decode_len, request.tenant)
        for peer in peers_of(submit):
            self.breakers.begin(peer, now_s)
        if request.num_retries:
            self.num_continuations += bool(request.output_ids)
            self.num_restarts += not request.output_ids
        actions: list[Action] = [StartAttempt(choice_id=request.choice_id, submit=submit)]
        if len(self._by_room) == 1:  # otherwise the time is already set
            self._inquire_s = now_s + INQUIRE_EVERY_S
            actions.append(WakeAt(time_s=self._inquire_s))
        return actions

    def _end_prefill(self, request: GenerateRequest) -> None:
        if request.submit is not None and request.submit.prefill is not None:
            self.load.remove(request.submit.prefill, request.prefill_len, request.tenant)
            self.breakers.forget(request.submit.prefill)

    def _leave(self, request: GenerateRequest, cancelled: Iterable[Peer]) -> list[Action]:
        """End a request's attempt, if there is one, and cancel it at these replicas."""
        submit = request.submit
        if submit is None:
            return []
        if request.phase is RequestPhase.WAITING and submit.prefill is not None:
            self.load.remove(submit.prefill, request.prefill_len, request.tenant)
        self.load.remove(submit.decode, request.decode_len, request.tenant)
        del self._by_room[submit.room]
        request.submit = None
        return [_cancel(peer, submit.room) for peer in cancelled]

    def _inquire(self, now_s: float) -> list[Action]:
        if now_s < self._inquire_s:
            return []
        self._inquire_s = now_s + INQUIRE_EVERY_S
        silent: dict[Peer, list[Room]] = defaultdict(list)
        actions: list[Action] = []
        for room, request in list(self._by_room.items()):
            if request.num_unanswered >= self._max_unanswered:
                decode = request.peers[-1]
                reason = f"{decode.replica} answered none of {request.num_unanswered} inquiries about the request"
                actions += self._retry(request, Cause.REPLICA_LOST, reason, [decode], request.peers, now_s)
            elif request.last_output_s <= now_s - INQUIRE_EVERY_S:
                request.num_unanswered += 1
                silent[request.peers[-1]].append(room)
        return actions + [
            SendMessage(
                address=peer.address, message=Inquire(rooms=rooms, sender=self.me, incarnation=peer.incarnation)
            )
            for peer, rooms in silent.items()
        ]

    def _retry(
        self,
        request: GenerateRequest,
        cause: Cause,
        reason: str,
        blamed: Sequence[Peer],
        cancelled: Sequence[Peer],
        now_s: float,
    ) -> list[Action]:
        """End a failed attempt; start another one, now or later, unless the request has failed too often.

        Args:
            blamed: replicas that may fail again.
            cancelled: replicas that may still be working on the attempt.
        """
        for peer in blamed:
            self.breakers.fail(peer, now_s)
        request.avoided |= frozenset(blamed)
        if request.num_retries >= self._max_retries:
            return self._fail(request, cause, reason, cancelled)
        actions = self._leave(request, cancelled)
        self._move(request, RequestPhase.PENDING, cause)
        request.reason = reason
        request.num_retries += 1
        if request.num_retries == 1:
            return actions + self._begin(request, self._draw(), now_s)
        request.due_s = now_s + self._retry_backoff_s * 2 ** (request.num_retries - 2)
        return [*actions, WakeAt(time_s=request.due_s)]

    def _fail(self, request: GenerateRequest, cause: Cause, reason: str, cancelled: Sequence[Peer]) -> list[Action]:
        actions = self._end(request, RequestPhase.FAILED, cause, cancelled)
        return [*actions, FailRequest(choice_id=request.choice_id, cause=cause, reason=reason)]

    def _end(
        self, request: GenerateRequest, phase: RequestPhase, event: str, cancelled: Sequence[Peer]
    ) -> list[Action]:
        actions = self._leave(request, cancelled)
        self._move(request, phase, event)
        self.ended[phase] += 1
        del self._open[request.choice_id]
        return actions

    def _drop(self, why: str) -> list[Action]:
        self.dropped[why] += 1
        return []

    def _move(self, request: GenerateRequest, phase: RequestPhase, event: str) -> None:
        request.phase = move(MOVES, request.phase, phase, event, f"request {request.choice_id}")


def _cancel(peer: Peer, room: Room) -> SendMessage:
    return SendMessage(address=peer.address, message=Cancel(room=room, incarnation=peer.incarnation))
