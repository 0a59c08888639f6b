"""The attempts under way, and what they show of each replica: how much is open there, and how often it failed.

Sans I/O.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.messages import Cancel
from cluster.spec.peer import Peer
from router.policies import Load
from router.request import (
    Action,
    Attempt,
    AttemptStarted,
    Pick,
    RequestPhase,
    RequestState,
    Send,
    Targets,
)

MAX_FAILURES = 5
"""Failures in a row that open a breaker: more than the retries of one request, which may itself be at fault."""
OPEN_S = 10.0
"""Time for which a breaker stays open, about as long as a rank's process needs to start again on a CPU."""
_NOTHING = Load()


class LoadBook:
    """Open requests and tokens per start of a replica; a replica with nothing open has no line."""

    def __init__(self) -> None:
        self._lines: dict[tuple[ReplicaId, Incarnation], Load] = {}

    def add(self, peer: Peer, num_tokens: int) -> None:
        self._change(peer, 1, num_tokens)

    def remove(self, peer: Peer, num_tokens: int) -> None:
        self._change(peer, -1, -num_tokens)

    def of(self, peer: Peer) -> Load:
        return self._lines.get((peer.replica, peer.incarnation), _NOTHING)

    def lines(self) -> dict[tuple[ReplicaId, Incarnation], Load]:
        return dict(self._lines)

    def _change(self, peer: Peer, num_requests: int, num_tokens: int) -> None:
        key = peer.replica, peer.incarnation
        line = self._lines.get(key, _NOTHING)
        num_requests += line.num_requests
        num_tokens += line.num_tokens
        assert num_requests >= 0, f"more requests ended than opened at {peer.replica}"
        assert num_tokens >= 0, f"more tokens ended than opened at {peer.replica}"
        if num_requests or num_tokens:
            self._lines[key] = Load(num_requests=num_requests, num_tokens=num_tokens)
        else:
            del self._lines[key]


class BreakerState(StrEnum):
    """State of a replica's circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    """The replica failed too often in a row, and gets none for a while."""
    HALF_OPEN = "half_open"
    """The replica was left alone long enough; one request tries it."""


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    """Consecutive failures."""
    opened_s: float | None = None
    """Time of the last failure that opened it, or of the last attempt that tried it."""


class Breakers:
    """One circuit breaker for every start of a replica; one that never failed has none.

    A breaker moves requests to other replicas and never refuses one: where all of a role are open, all are tried.
    """

    def __init__(self, max_failures: int = MAX_FAILURES, open_s: float = OPEN_S) -> None:
        self._max_failures = max_failures
        self._open_s = open_s
        self._breakers: dict[Peer, _Breaker] = {}

    def state(self, peer: Peer, now_s: float) -> BreakerState:
        breaker = self._breakers.get(peer)
        if breaker is None or breaker.opened_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < breaker.opened_s + self._open_s else BreakerState.HALF_OPEN

    def allows(self, peer: Peer, now_s: float) -> bool:
        """Return whether a replica should get the next attempt."""
        return self.state(peer, now_s) is not BreakerState.OPEN

    def allowed(self, peers: list[Peer], now_s: float) -> list[Peer]:
        """Return the replicas that should get the next attempt; all of them where none should."""
        if not self._breakers:
            return peers
        return [peer for peer in peers if self.allows(peer, now_s)] or peers

    def begin(self, peer: Peer, now_s: float) -> None:
        """Take note that a replica gets an attempt; one that is being tried gets no other for a while."""
        if self.state(peer, now_s) is BreakerState.HALF_OPEN:
            self._breakers[peer].opened_s = now_s

    def succeed(self, peer: Peer) -> None:
        """Close the breaker of a replica that did its part."""
        self._breakers.pop(peer, None)

    def fail(self, peer: Peer, now_s: float) -> None:
        breaker = self._breakers.setdefault(peer, _Breaker())
        breaker.num_failures += 1
        if breaker.num_failures >= self._max_failures:
            breaker.opened_s = now_s

    def forget(self, peer: Peer) -> None:
        """Drop the breaker of a replica that is gone for good."""
        self._breakers.pop(peer, None)


class Attempts:
    """The current attempts of all requests, at most one each."""

    def __init__(self, me: Peer, load: LoadBook, breakers: Breakers, pick: Pick) -> None:
        self._me = me
        self._load = load
        self._breakers = breakers
        self._pick = pick
        self._states: dict[Room, RequestState] = {}
        """Requests by the room of the current attempt, never of one that is over."""

    def __contains__(self, room: Room) -> bool:
        return room in self._states

    def __len__(self) -> int:
        return len(self._states)

    def find(self, room: Room) -> RequestState | None:
        return self._states.get(room)

    def silent_since(self, time_s: float) -> Iterator[Attempt]:
        """Yield the attempts that have sent nothing since then."""
        for state in self._states.values():
            if state.heard_s <= time_s and state.attempt is not None:
                yield state.attempt

    def begin(
        self, state: RequestState, room: Room, now_s: float, prompt_of: RequestState | None = None
    ) -> list[Action]:
        """Start an attempt, on the decode replica of the choice that brings the prompt if there is one.

        Returns:
            Nothing if a role has no replica.
        """
        first = prompt_of.attempt if prompt_of is not None else None
        if first is not None:
            targets: Targets | None = Targets(prefill=None, decode=first.targets.decode, brings_prompt=False)
        else:
            targets = self._pick(state.request, room, frozenset(state.avoided), now_s)
        if targets is None:
            return []
        assert room not in self._states, f"room {room} drawn twice"
        attempt = state.begin(room, targets, first.room if first is not None else None)
        self._states[room] = state
        state.heard_s = now_s
        if targets.prefill is not None:
            self._load.add(targets.prefill, attempt.prefill_len)
        self._load.add(targets.decode, attempt.decode_len)
        submit, actions = state.submit(attempt, self._me), list[Action]()
        actions.append(AttemptStarted(request_id=state.request_id, room=room, targets=targets))
        for peer in targets.peers:
            self._breakers.begin(peer, now_s)
            actions.append(Send(address=peer.address, message=submit))
        return actions

    def prefill_done(self, state: RequestState) -> None:
        assert state.attempt is not None
        self._leave_prefill(state.attempt)
        if state.attempt.targets.prefill is not None:
            self._breakers.succeed(state.attempt.targets.prefill)

    def decode_done(self, state: RequestState) -> None:
        assert state.attempt is not None
        self._breakers.succeed(state.attempt.targets.decode)

    def blame(self, state: RequestState, peers: Iterable[Peer], now_s: float) -> None:
        """Count a failure against these replicas, and avoid them for this request."""
        for peer in peers:
            self._breakers.fail(peer, now_s)
            state.avoided.add(peer)

    def leave(self, state: RequestState, cancelled: Sequence[Peer]) -> list[Action]:
        """Forget the attempt of a request, if it has one, and cancel it at these targets."""
        attempt = state.attempt
        if attempt is None:
            return []
        if state.phase is RequestPhase.WAITING:
            self._leave_prefill(attempt)
        self._load.remove(attempt.targets.decode, attempt.decode_len)
        del self._states[attempt.room]
        state.attempt = None
        return [
            Send(address=peer.address, message=Cancel(room=attempt.room, incarnation=peer.incarnation))
            for peer in cancelled
        ]

    def check_integrity(self, states: Collection[RequestState]) -> None:
        """Assert that the known attempts are those of the open requests, and the load book is their sum."""
        expected = LoadBook()
        under_way = {state.attempt.room: state for state in states if state.attempt is not None}
        assert self._states == under_way, f"attempts {self._states.keys()} are not {under_way.keys()}"
        for state in under_way.values():
            assert state.attempt is not None
            targets = state.attempt.targets
            if state.phase is RequestPhase.WAITING and targets.prefill is not None:
                expected.add(targets.prefill, state.attempt.prefill_len)
            expected.add(targets.decode, state.attempt.decode_len)
        assert self._load.lines() == expected.lines(), f"load {self._load.lines()} is not {expected.lines()}"

    def _leave_prefill(self, attempt: Attempt) -> None:
        if attempt.targets.prefill is not None:
            self._load.remove(attempt.targets.prefill, attempt.prefill_len)
