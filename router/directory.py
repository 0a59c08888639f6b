"""A router's view of each replica: readiness, open requests, and failures. Sans I/O."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import msgspec

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Role
from cluster.spec.registry import RankRecord, ReplicaEntry, TableSnapshot

MAX_FAILURES = 5
"""Number of consecutive failures that opens a breaker. It exceeds MAX_RETRIES, since one request may be at fault."""
OPEN_S = 10.0
"""Time for which a breaker stays open, about as long as a rank takes to restart on a CPU."""
LOOK_S = 0.5
"""Interval between looks at the table while a replica is missing."""
LAG_S = 1.0
"""Time without an answer after which the table may have lost replicas that still run, or the router was stalled."""


@dataclass(slots=True)
class _Known:
    entry: ReplicaEntry
    """Latest entry in which the replica was ready."""
    missing_since_s: float | None = None
    """Time of the first table without the replica, after which the table was heard without a lag."""
    silent: bool = False
    """True if the replica's lease expired, which is stronger evidence of its loss than its absence from the table."""

    @property
    def peer(self) -> Peer:
        return self.entry.leader.peer


@dataclass(frozen=True, slots=True)
class _Usable:
    peers: dict[Role, list[Peer]]
    """Peers by role, ordered by id."""
    missing: list[Role]
    """Roles without peers."""
    pool_tokens: int | None


class Directory:
    """The router's view of the rank table."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._heard_s = 0.0
        """Time of the table's latest answer."""
        self._known: dict[tuple[ReplicaId, Incarnation], _Known] = {}
        self._usable = _Usable({role: [] for role in Role}, [*Role], None)
        """Replicas that accept requests, found at every change because every request reads them."""
        self.snapshot: TableSnapshot | None = None
        """Latest snapshot; None before the bootstrap service responds."""

    def update(self, snapshot: TableSnapshot | None, now_s: float) -> list[Peer]:
        """Apply an answer of the table, None if nothing has changed; return the peers that are now lost.

        A replica is lost if it has been missing for the grace period, during which the table must have answered.
        """
        self._listen(now_s)
        if snapshot is not None:
            self._apply(snapshot, now_s)
        lost = {key: known.peer for key, known in self._known.items() if self._is_lost(known, now_s)}
        for key in lost:
            del self._known[key]
        if lost or snapshot is not None:
            self._usable = self._find_usable()
        return list(lost.values())

    def _listen(self, now_s: float) -> None:
        """Restart the grace period of missing replicas if the table, perhaps a new one, could not be heard."""
        if now_s > self._heard_s + LAG_S:
            for known in self._known.values():
                if known.missing_since_s is not None:
                    known.missing_since_s = now_s
        self._heard_s = now_s

    def _apply(self, snapshot: TableSnapshot, now_s: float) -> None:
        self.snapshot = snapshot
        entries = {(entry.replica, entry.incarnation): entry for entry in snapshot.replicas}
        self._known |= {key: _Known(entry) for key, entry in entries.items() if entry.ready}
        for key, known in self._known.items():
            entry = entries.get(key)
            if entry is not None and entry.ready:
                continue
            if known.missing_since_s is None:
                known.missing_since_s = now_s
            known.silent = known.silent or (entry is not None and not _is_new_to_table(entry, known.entry))

    @property
    def is_missing_any(self) -> bool:
        """Return whether the table must be asked every ``LOOK_S``."""
        return any(known.missing_since_s is not None for known in self._known.values())

    def ready(self, role: Role) -> list[Peer]:
        """Return the replicas of a role that accept requests, ordered by id."""
        return self._usable.peers[role]

    @property
    def missing(self) -> list[Role]:
        return self._usable.missing

    def ranks(self, peer: Peer) -> tuple[RankRecord, ...]:
        known = self._known.get((peer.replica, peer.incarnation))
        return known.entry.ranks if known is not None else ()

    def peers(self, *roles: Role) -> list[Peer]:
        """Return every replica of these roles that is not lost, even if it accepts no requests."""
        return [known.peer for known in self._known.values() if known.entry.role in roles]

    def pool_tokens_of(self, peer: Peer) -> int | None:
        """Return the size of a replica's KV pool in tokens; None before its first heartbeat."""
        known = self._known.get((peer.replica, peer.incarnation))
        pages = known.entry.load.total_pages if known is not None else 0
        return known.entry.leader.layout.tokens_in(pages) if known is not None and pages else None

    @property
    def pool_tokens(self) -> int | None:
        """Maximum request length in tokens that fits every usable replica; None before the first heartbeat."""
        return self._usable.pool_tokens

    def _find_usable(self) -> _Usable:
        entries = {role: self._usable_entries(role) for role in Role}
        peers = {role: [entry.leader.peer for entry in found] for role, found in entries.items()}
        all_entries = chain.from_iterable(entries.values())
        pages = ((entry.leader, entry.load.total_pages // entry.leader.sizes.dp) for entry in all_entries)
        tokens = (leader.layout.tokens_in(num_pages) for leader, num_pages in pages)
        missing = [role for role, found in peers.items() if not found]
        return _Usable(peers, missing, min(filter(None, tokens), default=None))

    def _usable_entries(self, role: Role) -> list[ReplicaEntry]:
        """Return the replicas in the table or, if there are none, those that are missing from it but may still run."""
        missing = [
            known.entry for known in self._taking(role) if known.missing_since_s is not None and not known.silent
        ]
        return sorted(self._present(role) or missing, key=lambda entry: (len(entry.replica), entry.replica))

    def _is_lost(self, known: _Known, now_s: float) -> bool:
        if known.missing_since_s is None:
            return False
        if known.silent and self._present(known.entry.role):
            return True
        assert self.snapshot is not None, "a known peer came from a snapshot"
        return self.snapshot.is_gone(known.peer) or now_s >= known.missing_since_s + self._grace_s

    def _present(self, role: Role) -> list[ReplicaEntry]:
        """Return the replicas in the table that accept requests."""
        return [known.entry for known in self._taking(role) if known.missing_since_s is None]

    def _taking(self, role: Role) -> list[_Known]:
        return [known for known in self._known.values() if known.entry.role is role and not known.entry.load.draining]


def _is_new_to_table(entry: ReplicaEntry, known: ReplicaEntry) -> bool:
    """Return whether a restarted table has not received the replica's heartbeat yet."""
    return entry.load.total_pages == 0 < known.load.total_pages


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Open requests and tokens of this router at one replica."""

    num_requests: int = 0
    num_tokens: int = 0
    """Uncomputed prompt tokens on prefill; prompt tokens plus the maximum answer length on decode."""


_NOTHING = Load()


class LoadBook:
    """Open requests and tokens per incarnation of a replica; idle replicas are not listed."""

    def __init__(self) -> None:
        self._lines: dict[tuple[ReplicaId, Incarnation], Load] = {}
        self._tokens_of: dict[tuple[ReplicaId, Incarnation, str], int] = {}
        """Tokens of each tenant at each replica."""

    def add(self, peer: Peer, num_tokens: int, tenant: str = "") -> None:
        self._change(peer, 1, num_tokens, tenant)

    def remove(self, peer: Peer, num_tokens: int, tenant: str = "") -> None:
        self._change(peer, -1, -num_tokens, tenant)

    def tokens_of(self, peer: Peer, tenant: str) -> int:
        return self._tokens_of.get((peer.replica, peer.incarnation, tenant), 0)

    def of(self, peer: Peer) -> Load:
        return self._lines.get((peer.replica, peer.incarnation), _NOTHING)

    def lines(self) -> dict[tuple[ReplicaId, Incarnation], Load]:
        return dict(self._lines)

    def _change(self, peer: Peer, num_requests: int, num_tokens: int, tenant: str) -> None:
        key = peer.replica, peer.incarnation
        own_tokens = self._tokens_of.pop((*key, tenant), 0) + num_tokens
        if own_tokens:
            self._tokens_of[*key, tenant] = own_tokens
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
    CLOSED = "closed"
    OPEN = "open"
    """The replica failed too often, and gets no requests for a while."""
    HALF_OPEN = "half_open"
    """The wait is over, and one request probes the replica."""


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    """Number of consecutive failures."""
    opened_s: float | None = None
    """Time of the last failure or probe."""


class Breakers:
    """One circuit breaker per incarnation of a replica that has failed.

    Breakers move requests to other replicas but never refuse any: if all breakers of a role are open, all replicas
    are tried.
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
        return self.state(peer, now_s) is not BreakerState.OPEN

    def allowed(self, peers: list[Peer], now_s: float) -> list[Peer]:
        """Return the replicas that may get the next attempt, or all of them if every breaker is open."""
        if not self._breakers:
            return peers
        return [peer for peer in peers if self.allows(peer, now_s)] or peers

    def begin(self, peer: Peer, now_s: float) -> None:
        """Record an attempt at a replica. In state HALF_OPEN, the replica gets no other attempt for a while."""
        if self.state(peer, now_s) is BreakerState.HALF_OPEN:
            self._breakers[peer].opened_s = now_s

    def fail(self, peer: Peer, now_s: float) -> None:
        breaker = self._breakers.setdefault(peer, _Breaker())
        breaker.num_failures += 1
        if breaker.num_failures >= self._max_failures:
            breaker.opened_s = now_s

    def forget(self, peer: Peer) -> None:
        """Forget a replica's failures, because it has succeeded or is lost."""
        self._breakers.pop(peer, None)
