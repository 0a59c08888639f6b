"""The life of every open request, sans I/O: events in, actions out; ``router.relay`` is the loop around it.

1. ``open`` draws a room and sends the same Submit to the prefill and the decode leader: an attempt.
2. Outputs of the decode leader become chunks for the client; the first one means that prefill is done.
3. A failed attempt is followed by another one, in a room of its own and on other replicas where there are any. It
   carries the tokens that the client has, and continues after them.
4. The last Output, too many failures, a client that left, or the deadline ends the request. Every target that may still
   work gets a Cancel, and nothing of the request is kept.

A message may be lost. An attempt that has been silent for a while is asked about at its decode leader, again and again;
silence alone proves nothing, since prompts take long.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from cluster.spec.config import RouterConfig
from cluster.spec.ids import Room, draw_room
from cluster.spec.lifecycle import move
from cluster.spec.messages import INQUIRE_EVERY_S, Blame, Cancel, Failure, Inquire, Output
from cluster.spec.peer import Peer
from cluster.spec.tiers import CachedTokens
from router.attempts import Attempts, Breakers, LoadBook
from router.request import (
    ENDS,
    MOVES,
    Action,
    Cause,
    Fail,
    GenerateRequest,
    OutputChunk,
    Pick,
    RequestId,
    RequestPhase,
    RequestState,
    Send,
    Wait,
)

_NO_TOKENS = CachedTokens()
RETRY_BACKOFF_S = 0.1
"""Wait before the second retry, doubled each time. The first is immediate, since it goes to other replicas."""


class RequestTable:
    def __init__(
        self,
        me: Peer,
        config: RouterConfig,
        load: LoadBook,
        breakers: Breakers,
        pick: Pick,
        draw: Callable[[], Room] = draw_room,
        retry_backoff_s: float = RETRY_BACKOFF_S,
    ) -> None:
        """``load`` and ``breakers`` are updated here and read by ``pick``."""
        self.me = me
        self.load = load
        self.breakers = breakers
        self._config = config
        self._retry_backoff_s = retry_backoff_s
        self._draw = draw
        self._states: dict[RequestId, RequestState] = {}
        self._attempts = Attempts(me, load, breakers, pick)
        self._inquire_s = 0.0
        """Time to inquire about silent attempts; only while there are any."""
        self.dropped: Counter[str] = Counter()
        """Unused messages: of a ``late`` room, from a ``foreign`` sender, ``duplicate``."""
        self.ended: Counter[RequestPhase] = Counter()
        self.num_retries = 0
        """Attempts that began a request anew."""
        self.num_continuations = 0
        """Attempts that continued after tokens which the client had."""

    @property
    def num_open(self) -> int:
        return len(self._states)

    @property
    def next_deadline_s(self) -> float | None:
        """Return when ``expire`` may next find something."""
        if not self._states:
            return None
        inquire_s = self._inquire_s if len(self._attempts) else math.inf
        return min(inquire_s, min(state.wake_at_s for state in self._states.values()))

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self._states

    def is_under_way(self, room: Room) -> bool:
        return room in self._attempts

    def open(
        self, request: GenerateRequest, deadline_s: float, now_s: float, prompt_of: RequestId | None = None
    ) -> tuple[RequestId, list[Action]]:
        """Start a request; the choice ``prompt_of`` brings the prompt to the decode replica of both."""
        room = self._draw()
        request_id = RequestId(room)
        assert request_id not in self._states, f"room {room} drawn twice"
        state = RequestState(request_id=request_id, request=request, deadline_s=deadline_s)
        self._states[request_id] = state
        first = self._states.get(prompt_of) if prompt_of is not None else None
        return request_id, self._begin(state, room, now_s, first)

    def on_output(self, output: Output, now_s: float) -> list[Action]:
        state = self._attempts.find(output.room)
        if state is None:
            return self._drop("late")
        if not state.is_decode(output.replica, output.incarnation):
            return self._drop("foreign")
        state.heard_s = now_s
        if problem := state.problem(output):
            reason = f"{output.replica}: {problem}"
            return self._retry(state, Cause.BROKEN_OUTPUT, reason, state.targets[-1:], state.targets, now_s)
        num_known = len(state.given) - output.first_index
        token_ids = output.token_ids[num_known:]
        if not token_ids and output.finish is None:
            return self._drop("duplicate")
        is_first = not state.given
        if state.phase is RequestPhase.WAITING:
            self._attempts.prefill_done(state)
            self._move(state, RequestPhase.STREAMING, "first output")
        state.given += token_ids
        if output.finish is not None:
            self._attempts.decode_done(state)
            self._end(state, RequestPhase.FINISHED, "last output", [])
        return [
            OutputChunk(
                request_id=state.request_id,
                token_ids=token_ids,
                finish=output.finish,
                logprobs=output.logprobs[num_known:] if output.logprobs else (),
                prompt_logprobs=(output.prompt_logprobs if is_first else None) or (),
                cached=output.cached if is_first else _NO_TOKENS,
                phases=output.phases if is_first else None,
            )
        ]

    def on_failure(self, failure: Failure, now_s: float) -> list[Action]:
        """Take the failure of one target; the attempt is cancelled at the other one at once."""
        state = self._attempts.find(failure.room)
        if state is None:
            return self._drop("late")
        failed = state.target(failure.replica, failure.incarnation)
        if failed is None:
            return self._drop("foreign")
        if failed not in state.awaited:
            return self._drop("late")
        reason = f"{failure.replica}: {failure.reason}"
        others = [peer for peer in state.targets if peer is not failed]
        if not failure.retryable:
            return self._fail(state, Cause.REFUSED, reason, others)
        blamed = {Blame.SENDER: [failed], Blame.BOTH: state.targets, Blame.NEITHER: []}[failure.blame]
        return self._retry(state, Cause.REPLICA_FAILED, reason, blamed, others, now_s)

    def on_lost(self, peer: Peer, now_s: float) -> list[Action]:
        """Give up a replica. It gets Cancels all the same: perhaps only its way to the table is broken."""
        actions: list[Action] = []
        for state in list(self._states.values()):
            if peer in state.awaited:
                reason = f"{peer.replica} was lost before the answer was complete"
                actions += self._retry(state, Cause.REPLICA_LOST, reason, [peer], state.targets, now_s)
        self.breakers.forget(peer)
        return actions

    def on_unreachable(self, room: Room, address: str, reason: str, now_s: float) -> list[Action]:
        """Take note that the Submit of an attempt could not be sent."""
        state = self._attempts.find(room)
        if state is None:
            return []
        blamed = [peer for peer in state.targets if peer.address == address]
        return self._retry(state, Cause.REPLICA_LOST, reason, blamed, state.targets, now_s)

    def on_inquire(self, inquire: Inquire) -> list[Action]:
        """Answer a leader that hears nothing of the end of its attempts: cancel those that are over."""
        if inquire.incarnation != self.me.incarnation:
            return self._drop("foreign")
        leader = inquire.sender
        return [
            Send(address=leader.address, message=Cancel(room=room, incarnation=leader.incarnation))
            for room in inquire.rooms
            if room not in self._attempts
        ]

    def on_client_left(self, request_id: RequestId) -> list[Action]:
        """Cancel a request that nobody reads any more."""
        state = self._states[request_id]
        return self._end(state, RequestPhase.CANCELLED, "client left", state.targets)

    def on_enough(self, request_id: RequestId) -> list[Action]:
        """Finish a request that a stop string completed before the model ended it."""
        state = self._states[request_id]
        if state.attempt is not None:
            self._attempts.decode_done(state)
        return self._end(state, RequestPhase.FINISHED, "stop string", state.targets)

    def expire(self, now_s: float) -> list[Action]:
        """Fail requests past their deadline, start attempts that are due, and ask about silent ones."""
        actions: list[Action] = []
        for state in [state for state in self._states.values() if state.wake_at_s <= now_s]:
            if state.deadline_s <= now_s:
                reason = f"not finished before its deadline (router.request_timeout_s): {state.awaits}"
                actions += self._fail(state, Cause.TIMED_OUT, reason, state.targets)
            else:
                actions += self._begin(state, self._draw(), now_s)
        return actions + self._inquire(now_s)

    def stop(self) -> list[Action]:
        return [
            action
            for state in list(self._states.values())
            for action in self._fail(state, Cause.STOPPED, "the router stops", state.targets)
        ]

    def check_integrity(self) -> None:
        """Assert that every open request is in an open phase, and has an attempt unless it waits for one."""
        for request_id, state in self._states.items():
            assert request_id == state.request_id, f"request {state.request_id} is filed under {request_id}"
            assert state.phase not in ENDS, f"request {request_id} is {state.phase.name} and still open"
            is_between = state.phase is RequestPhase.BETWEEN
            assert (state.attempt is None) == is_between, f"request {request_id}: {state.phase.name}"
        self._attempts.check_integrity(self._states.values())

    def _begin(
        self, state: RequestState, room: Room, now_s: float, prompt_of: RequestState | None = None
    ) -> list[Action]:
        """Start an attempt; fail the request if there is no replica for it."""
        actions = self._attempts.begin(state, room, now_s, prompt_of)
        if not actions:
            reason = (
                f"no replica is ready for another attempt: {state.reason}" if state.reason else "no replica is ready"
            )
            return self._fail(state, Cause.NO_REPLICA, reason, [])
        if state.num_retries:
            self.num_continuations += bool(state.given)
            self.num_retries += not state.given
        self._move(state, RequestPhase.WAITING, "attempt")
        if len(self._attempts) == 1:  # with others a time is set
            self._inquire_s = now_s + INQUIRE_EVERY_S
            actions.append(Wait(until_s=self._inquire_s))
        return actions

    def _inquire(self, now_s: float) -> list[Action]:
        if now_s < self._inquire_s:
            return []
        self._inquire_s = now_s + INQUIRE_EVERY_S
        silent: dict[Peer, list[Room]] = defaultdict(list)
        for attempt in self._attempts.silent_since(now_s - INQUIRE_EVERY_S):
            silent[attempt.targets.decode].append(attempt.room)
        return [
            Send(address=peer.address, message=Inquire(rooms=rooms, sender=self.me, incarnation=peer.incarnation))
            for peer, rooms in silent.items()
        ]

    def _retry(
        self,
        state: RequestState,
        cause: Cause,
        reason: str,
        blamed: Sequence[Peer],
        cancelled: Sequence[Peer],
        now_s: float,
    ) -> list[Action]:
        """End a failed attempt and make another one, now or later, if the request may have one.

        Args:
            blamed: targets that may fail again.
            cancelled: targets that may still work for it.
        """
        self._attempts.blame(state, blamed, now_s)
        if state.num_retries >= self._config.max_retries:
            return self._fail(state, cause, reason, cancelled)
        actions = self._attempts.leave(state, cancelled)
        self._move(state, RequestPhase.BETWEEN, cause)
        state.reason = reason
        state.num_retries += 1
        if state.num_retries == 1:
            return actions + self._begin(state, self._draw(), now_s)
        state.due_s = now_s + self._retry_backoff_s * 2 ** (state.num_retries - 2)
        return [*actions, Wait(until_s=state.due_s)]

    def _fail(self, state: RequestState, cause: Cause, reason: str, cancelled: Sequence[Peer]) -> list[Action]:
        actions = self._end(state, RequestPhase.FAILED, cause, cancelled)
        return [*actions, Fail(request_id=state.request_id, cause=cause, reason=reason)]

    def _end(self, state: RequestState, phase: RequestPhase, event: str, cancelled: Sequence[Peer]) -> list[Action]:
        actions = self._attempts.leave(state, cancelled)
        self._move(state, phase, event)
        self.ended[phase] += 1
        del self._states[state.request_id]
        return actions

    def _drop(self, why: str) -> list[Action]:
        self.dropped[why] += 1
        return []

    def _move(self, state: RequestState, phase: RequestPhase, event: str) -> None:
        state.phase = move(MOVES, state.phase, phase, event, f"request {state.request_id}")
