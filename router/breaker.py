"""Which replicas have failed so often in a row that requests are better kept from them. Sans I/O.

A breaker moves requests to other replicas, it never refuses one: where every replica of a role is open, all are tried.
"""

from dataclasses import dataclass
from enum import StrEnum

from cluster.spec.ids import Room
from cluster.spec.peer import Peer


class BreakerState(StrEnum):
    """Whether a replica should get requests."""

    CLOSED = "closed"
    """It should."""
    OPEN = "open"
    """It failed too often in a row, and is left alone for a while."""
    HALF_OPEN = "half_open"
    """It was left alone long enough; one request tries it."""


@dataclass(slots=True)
class _Line:
    num_failures: int = 0
    """In a row."""
    opened_s: float | None = None
    trial: Room | None = None
    """The attempt that tries it."""


class Breakers:
    """One for every start of a replica; one that never failed has no line."""

    def __init__(self, max_failures: int, open_s: float) -> None:
        self._max_failures = max_failures
        self._open_s = open_s
        self._lines: dict[Peer, _Line] = {}

    def state(self, peer: Peer, now_s: float) -> BreakerState:
        """Where the breaker of a replica is."""
        line = self._lines.get(peer)
        if line is None or line.opened_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < line.opened_s + self._open_s else BreakerState.HALF_OPEN

    def allows(self, peer: Peer, now_s: float) -> bool:
        """Whether a replica should get the next attempt."""
        state = self.state(peer, now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._lines[peer].trial is None)

    def allowed(self, peers: list[Peer], now_s: float) -> list[Peer]:
        """Those that should get the next attempt; all of them where none should."""
        if not self._lines:
            return peers
        return [peer for peer in peers if self.allows(peer, now_s)] or peers

    def begin(self, peer: Peer, room: Room, now_s: float) -> None:
        """A replica gets an attempt."""
        if self.state(peer, now_s) is BreakerState.HALF_OPEN and self._lines[peer].trial is None:
            self._lines[peer].trial = room

    def end(self, peer: Peer, room: Room) -> None:
        """An attempt is over, whether or not it said anything about the replica."""
        line = self._lines.get(peer)
        if line is not None and line.trial == room:
            line.trial = None

    def succeed(self, peer: Peer) -> None:
        """A replica did its part of an attempt."""
        self._lines.pop(peer, None)

    def fail(self, peer: Peer, now_s: float) -> None:
        """A replica failed an attempt."""
        line = self._lines.setdefault(peer, _Line())
        line.num_failures += 1
        if line.num_failures >= self._max_failures:
            line.opened_s = now_s

    def forget(self, peer: Peer) -> None:
        """A replica is gone for good."""
        self._lines.pop(peer, None)
