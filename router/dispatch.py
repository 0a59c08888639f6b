"""The life of every open request, sans I/O: events in, actions out; ``router.relay`` is the loop around it.

1. ``open`` draws a room and sends the same Submit to the prefill and the decode leader: an attempt.
2. Outputs of the decode leader become chunks for the client; the first one means that prefill is done.
3. A failed attempt is followed by another one, in a room of its own and on other replicas where there are any. It
   carries the tokens that the client has, and continues after them.
4. The last Output, too many failures, a client that left, or the deadline ends the request. Every replica that may
   still work gets a Cancel, and nothing of the request is kept.

A message may be lost. An attempt that has been silent for a while is asked about at its decode leader, again and again;
silence alone proves nothing, since prompts take long.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from cluster.spec.config import RouterConfig
from cluster.spec.errors import move
from cluster.spec.ids import Peer, Room, draw_room
from cluster.spec.messages import INQUIRE_EVERY_S, Blame, Cancel, Failure, Inquire, Output
from cluster.spec.tiers import CachedTokens
from router.directory import Breakers, LoadBook
from router.request import (
    ENDS,
    MOVES,
    Action,
    Attempt,
    AttemptStarted,
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
        self._pick = pick
        self._draw = draw
        self._states: dict[RequestId, RequestState] = {}
        self._by_room: dict[Room, RequestState] = {}
        """Requests by the room of the current attempt, never of one that is over."""
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
        inquire_s = self._inquire_s if self._by_room else math.inf
        return min(inquire_s, min(state.wake_at_s for state in self._states.values()))

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self._states

    def is_under_way(self, room: Room) -> bool:
        return room in self._by_room

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
        state = self._by_room.get(output.room)
        if state is None:
            return self._drop("late")
        if not state.is_decode(output.replica, output.incarnation):
            return self._drop("foreign")
        state.heard_s = now_s
        if problem := state.problem(output):
            reason = f"{output.replica}: {problem}"
            return self._retry(state, Cause.BROKEN_OUTPUT, reason, state.peers[-1:], state.peers, now_s)
        num_known = len(state.given) - output.first_index
        token_ids = output.token_ids[num_known:]
        if not token_ids and output.finish is None:
            return self._drop("duplicate")
        is_first = not state.given
        if state.phase is RequestPhase.WAITING:
            self._prefill_done(state)
            self._move(state, RequestPhase.STREAMING, "first output")
        state.given += token_ids
        if output.finish is not None:
            self.breakers.succeed(state.peers[-1])
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
        """Handle the failure of one replica; the attempt is cancelled at the other one at once."""
        state = self._by_room.get(failure.room)
        if state is None:
            return self._drop("late")
        sender = failure.replica, failure.incarnation
        failed = next((peer for peer in state.peers if (peer.replica, peer.incarnation) == sender), None)
        if failed is None:
            return self._drop("foreign")
        if failed not in state.awaited:
            return self._drop("late")
        reason = f"{failure.replica}: {failure.reason}"
        others = [peer for peer in state.peers if peer is not failed]
        if not failure.retryable:
            return self._fail(state, Cause.REFUSED, reason, others)
        blamed = {Blame.SENDER: [failed], Blame.BOTH: state.peers, Blame.NEITHER: []}[failure.blame]
        return self._retry(state, Cause.REPLICA_FAILED, reason, blamed, others, now_s)

    def on_lost(self, peer: Peer, now_s: float) -> list[Action]:
        """Give up a replica. It gets Cancels all the same: perhaps only its way to the table is broken."""
        actions: list[Action] = []
        for state in list(self._states.values()):
            if peer in state.awaited:
                reason = f"{peer.replica} was lost before the answer was complete"
                actions += self._retry(state, Cause.REPLICA_LOST, reason, [peer], state.peers, now_s)
        self.breakers.forget(peer)
        return actions

    def on_unreachable(self, room: Room, address: str, reason: str, now_s: float) -> list[Action]:
        """Take note that the Submit of an attempt could not be sent."""
        state = self._by_room.get(room)
        if state is None:
            return []
        blamed = [peer for peer in state.peers if peer.address == address]
        return self._retry(state, Cause.REPLICA_LOST, reason, blamed, state.peers, now_s)

    def on_inquire(self, inquire: Inquire) -> list[Action]:
        """Answer a leader that hears nothing of the end of its attempts: cancel those that are over."""
        if inquire.incarnation != self.me.incarnation:
            return self._drop("foreign")
        leader = inquire.sender
        return [
            Send(address=leader.address, message=Cancel(room=room, incarnation=leader.incarnation))
            for room in inquire.rooms
            if room not in self._by_room
        ]

    def on_client_left(self, request_id: RequestId) -> list[Action]:
        state = self._states[request_id]
        return self._end(state, RequestPhase.CANCELLED, "client left", state.peers)

    def on_enough(self, request_id: RequestId) -> list[Action]:
        """Finish a request that a stop string completed before the model ended it."""
        state = self._states[request_id]
        if state.attempt is not None:
            self.breakers.succeed(state.attempt.decode)
        return self._end(state, RequestPhase.FINISHED, "stop string", state.peers)

    def expire(self, now_s: float) -> list[Action]:
        """Fail requests past their deadline, start attempts that are due, and ask about silent ones."""
        actions: list[Action] = []
        for state in [state for state in self._states.values() if state.wake_at_s <= now_s]:
            if state.deadline_s <= now_s:
                reason = f"not finished before its deadline (router.request_timeout_s): {state.awaits}"
                actions += self._fail(state, Cause.TIMED_OUT, reason, state.peers)
            else:
                actions += self._begin(state, self._draw(), now_s)
        return actions + self._inquire(now_s)

    def stop(self) -> list[Action]:
        return [
            action
            for state in list(self._states.values())
            for action in self._fail(state, Cause.STOPPED, "the router stops", state.peers)
        ]

    def check_integrity(self) -> None:
        """Assert that every open request is in an open phase, and has an attempt unless it waits for one."""
        for request_id, state in self._states.items():
            assert request_id == state.request_id, f"request {state.request_id} is filed under {request_id}"
            assert state.phase not in ENDS, f"request {request_id} is {state.phase.name} and still open"
            is_between = state.phase is RequestPhase.BETWEEN
            assert (state.attempt is None) == is_between, f"request {request_id}: {state.phase.name}"
        under_way = {state.attempt.room: state for state in self._states.values() if state.attempt is not None}
        assert self._by_room == under_way, f"attempts {self._by_room.keys()} are not {under_way.keys()}"
        expected = LoadBook()
        for state in under_way.values():
            assert state.attempt is not None
            if state.phase is RequestPhase.WAITING and state.attempt.prefill is not None:
                expected.add(state.attempt.prefill, state.prefill_len)
            expected.add(state.attempt.decode, state.decode_len)
        assert self.load.lines() == expected.lines(), f"load {self.load.lines()} is not {expected.lines()}"

    def _begin(
        self, state: RequestState, room: Room, now_s: float, prompt_of: RequestState | None = None
    ) -> list[Action]:
        """Start an attempt, on the decode replica of the choice that brings the prompt if there is one.

        The request fails if a role has no replica.
        """
        first = prompt_of.attempt if prompt_of is not None else None
        if first is not None:
            attempt: Attempt | None = Attempt(room=room, prefill=None, decode=first.decode, prompt_of=first.room)
        else:
            attempt = self._pick(state.request, room, frozenset(state.avoided), now_s)
        if attempt is None:
            after = f" for another attempt: {state.reason}" if state.reason else ""
            return self._fail(state, Cause.NO_REPLICA, f"no replica is ready{after}", [])
        assert room not in self._by_room, f"room {room} drawn twice"
        self._by_room[room] = state
        state.attempt, state.heard_s = attempt, now_s
        self._move(state, RequestPhase.WAITING, "attempt")
        if attempt.prefill is not None:
            self.load.add(attempt.prefill, state.prefill_len)
        self.load.add(attempt.decode, state.decode_len)
        actions: list[Action] = [AttemptStarted(request_id=state.request_id, attempt=attempt)]
        submit = state.submit(attempt, self.me)
        for peer in attempt.peers:
            self.breakers.begin(peer, now_s)
            actions.append(Send(address=peer.address, message=submit))
        if state.num_retries:
            self.num_continuations += bool(state.given)
            self.num_retries += not state.given
        if len(self._by_room) == 1:  # with others a time is set
            self._inquire_s = now_s + INQUIRE_EVERY_S
            actions.append(Wait(until_s=self._inquire_s))
        return actions

    def _prefill_done(self, state: RequestState) -> None:
        if state.attempt is not None and state.attempt.prefill is not None:
            self.load.remove(state.attempt.prefill, state.prefill_len)
            self.breakers.succeed(state.attempt.prefill)

    def _leave(self, state: RequestState, cancelled: Iterable[Peer]) -> list[Action]:
        """Forget the attempt of a request, if it has one, and cancel it at these replicas."""
        attempt = state.attempt
        if attempt is None:
            return []
        if state.phase is RequestPhase.WAITING and attempt.prefill is not None:
            self.load.remove(attempt.prefill, state.prefill_len)
        self.load.remove(attempt.decode, state.decode_len)
        del self._by_room[attempt.room]
        state.attempt = None
        return [
            Send(address=peer.address, message=Cancel(room=attempt.room, incarnation=peer.incarnation))
            for peer in cancelled
        ]

    def _inquire(self, now_s: float) -> list[Action]:
        if now_s < self._inquire_s:
            return []
        self._inquire_s = now_s + INQUIRE_EVERY_S
        silent: dict[Peer, list[Room]] = defaultdict(list)
        for room, state in self._by_room.items():
            if state.heard_s <= now_s - INQUIRE_EVERY_S:
                silent[state.peers[-1]].append(room)
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
            blamed: replicas that may fail again.
            cancelled: replicas that may still work for it.
        """
        for peer in blamed:
            self.breakers.fail(peer, now_s)
            state.avoided.add(peer)
        if state.num_retries >= self._config.max_retries:
            return self._fail(state, cause, reason, cancelled)
        actions = self._leave(state, cancelled)
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
        actions = self._leave(state, cancelled)
        self._move(state, phase, event)
        self.ended[phase] += 1
        del self._states[state.request_id]
        return actions

    def _drop(self, why: str) -> list[Action]:
        self.dropped[why] += 1
        return []

    def _move(self, state: RequestState, phase: RequestPhase, event: str) -> None:
        state.phase = move(MOVES, state.phase, phase, event, f"request {state.request_id}")
