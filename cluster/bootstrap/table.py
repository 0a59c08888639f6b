"""Rank table as a state machine: registered ranks, leases, and replicas whose processes are confirmed dead.

It is soft state: after a restart, leaders register again at their next heartbeat, and the supervisor reports again
which incarnations have ended.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from cluster.spec.clock import AttentiveClock, Clock
from cluster.spec.errors import BatonError
from cluster.spec.ids import Incarnation, ReplicaId, parse_replica_id
from cluster.spec.ranks import global_rank, world_size
from cluster.spec.registry import Heartbeat, RankRecord, ReplicaEntry, ReplicaLoad, TableSnapshot

LAG_S = 0.5
"""Maximum time that counts for leases between two looks of the service, which looks several times as often."""


class RefusalCode(StrEnum):
    UNKNOWN_RANKS = "unknown_ranks"
    """The sender's records are not the registered ones; the leader must register all of its records again."""
    SUPERSEDED = "superseded"
    """A later incarnation of the replica is known, or the sender's own one has ended."""
    MISMATCH = "mismatch"
    """The record contradicts itself or other records of its replica."""


class TableRefusedError(BatonError):
    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type["TableRefusedError"], tuple[RefusalCode, str]]:
        """Pickle code and message, because another process reports the error."""
        return TableRefusedError, (self.code, str(self))


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """A RefusalCode of the table, or ``bad_request``, ``unauthorized``, ``not_found`` or ``refused`` if the request did
    not reach the table."""
    message: str


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every response with status 4xx."""

    error: ErrorDetail


def records_digest(records: Iterable[RankRecord]) -> str:
    """Return a short hash of a replica's records, independent of their order."""
    ordered = sorted(records, key=lambda record: record.global_rank)
    return hashlib.blake2b(msgspec.msgpack.encode(ordered), digest_size=16).hexdigest()


class BootstrapTable:
    """All ranks of all replicas. Times are attentive seconds of the service, passed in by the caller.

    A replica is ready when all ranks of its highest incarnation are registered and hold a lease. Each rank renews its
    own lease, and a new rank has one lease period to do so for the first time.
    """

    def __init__(self, lease_s: float, first_version: int = 0) -> None:
        self._lease_s = lease_s
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._ended: dict[ReplicaId, Incarnation] = {}
        self._reaped: dict[ReplicaId, Incarnation] = {}
        self._snapshot: TableSnapshot | None = None
        self.version = first_version
        self.urgent_version = first_version
        """Version of the latest change that watchers see at once.

        Changes of a replica's load are not urgent: with many replicas, each would otherwise read the whole table many
        times a second.
        """

    def register(self, record: RankRecord) -> None:
        """Add one record. Idempotent; a higher incarnation replaces all records of a lower one.

        Raises:
            TableRefusedError: the incarnation is superseded, or the record is inconsistent.
        """
        _check_alone(record)
        replica = self._current(record.replica, record.incarnation)
        if replica is None:
            self._replicas[record.replica] = replica = _Replica(record)
            self._change()
            return
        known = replica.records.get(record.coords)
        _check_against(record, known, replica.first)
        if known is None:
            replica.records[record.coords] = record
            replica.digest = records_digest(replica.records.values())
            self._change(is_urgent=False)

    def heartbeat(self, beat: Heartbeat, now_s: float) -> None:
        """Renew the lease of rank 0, and record the replica's load.

        Raises:
            TableRefusedError: the incarnation is superseded, or the registered records do not match the digest.
        """
        self.expire(now_s)
        replica = self._current(beat.replica, beat.incarnation)
        if replica is None or not replica.complete or replica.digest != beat.records_digest:
            raise TableRefusedError(
                RefusalCode.UNKNOWN_RANKS,
                f"{beat.replica}, incarnation {beat.incarnation}: the registered records do not match the "
                "heartbeat's digest; send every record again",
            )
        if beat.load != replica.load:
            self._change(is_urgent=beat.load.draining != replica.load.draining)
        replica.load = beat.load
        for rank in range(1, len(replica.records)):
            replica.lease_ends_s.setdefault(rank, now_s + self._lease_s)
        self._renew(replica, 0, now_s)

    def alive(self, replica: ReplicaId, incarnation: Incarnation, rank: int, now_s: float) -> None:
        """Renew the lease of one rank other than rank 0.

        Raises:
            TableRefusedError: the incarnation is superseded, or the rank is not registered.
        """
        self.expire(now_s)
        current = self._current(replica, incarnation)
        if current is None or rank not in range(1, world_size(current.first.sizes)):
            raise TableRefusedError(RefusalCode.UNKNOWN_RANKS, f"{replica} rank {rank}: not registered")
        self._renew(current, rank, now_s)

    def unregister(self, replica: ReplicaId, incarnation: Incarnation, *, reaped: bool) -> None:
        """Remove an incarnation and all earlier ones; ``reaped`` means that their processes are confirmed dead."""
        if incarnation > self._ended.get(replica, Incarnation(0)):
            self._ended[replica] = incarnation
            self._change()
        if reaped and incarnation > self._reaped.get(replica, Incarnation(0)):
            self._reaped[replica] = incarnation
            self._change()
        current = self._replicas.get(replica)
        if current and current.first.incarnation <= incarnation:
            del self._replicas[replica]

    def expire(self, now_s: float) -> None:
        for replica in self._replicas.values():
            for rank in [rank for rank, end_s in replica.lease_ends_s.items() if end_s <= now_s]:
                del replica.lease_ends_s[rank]
                replica.silent.add(rank)
                self._change()

    def snapshot(self, now_s: float) -> TableSnapshot:
        self.expire(now_s)
        if self._snapshot is None or self._snapshot.version != self.version:
            self._snapshot = TableSnapshot(
                version=self.version,
                replicas=tuple(self._replicas[replica].entry() for replica in sorted(self._replicas)),
                reaped=dict(self._reaped),
            )
        return self._snapshot

    def is_outdated(self, version: int) -> bool:
        """Return whether a table of this version lacks an urgent change.

        Versions from the future do too: a restarted service may start from any number.
        """
        return not self.urgent_version <= version <= self.version

    def _renew(self, replica: "_Replica", rank: int, now_s: float) -> None:
        was = (replica.ready, rank in replica.silent)
        replica.silent.discard(rank)
        replica.lease_ends_s[rank] = now_s + self._lease_s
        if (replica.ready, False) != was:
            self._change()

    def _change(self, *, is_urgent: bool = True) -> None:
        self.version += 1
        if is_urgent:
            self.urgent_version = self.version

    def _current(self, replica: ReplicaId, incarnation: Incarnation) -> "_Replica | None":
        """Return the replica if this incarnation is registered; None if it would be new."""
        current = self._replicas.get(replica)
        ended = self._ended.get(replica, Incarnation(0))
        if incarnation <= ended or (current and incarnation < current.first.incarnation):
            newest = max(ended, current.first.incarnation if current else ended)
            state = "has ended" if newest == incarnation else f"was replaced by {newest}"
            raise TableRefusedError(
                RefusalCode.SUPERSEDED, f"{replica}: incarnation {incarnation} {state}; only a higher one may register"
            )
        return current if current and current.first.incarnation == incarnation else None


class _Replica:
    """Rank records, load and leases of one incarnation."""

    def __init__(self, first: RankRecord) -> None:
        self.first = first
        self.records = {first.coords: first}
        self.digest = records_digest([first])
        self.load = ReplicaLoad()
        self.lease_ends_s: dict[int, float] = {}
        """Time at which each lease expires, by global rank."""
        self.silent: set[int] = set()

    @property
    def complete(self) -> bool:
        return len(self.records) == world_size(self.first.sizes)

    @property
    def ready(self) -> bool:
        return self.complete and 0 in self.lease_ends_s and not self.silent

    def entry(self) -> ReplicaEntry:
        return ReplicaEntry(
            replica=self.first.replica,
            incarnation=self.first.incarnation,
            ready=self.ready,
            silent=tuple(sorted(self.silent)),
            ranks=tuple(sorted(self.records.values(), key=lambda record: record.global_rank)),
            load=self.load,
        )


def _check_alone(record: RankRecord) -> None:
    try:
        parse_replica_id(record.replica)
        expected = global_rank(record.coords, record.sizes)
    except ValueError as exc:
        raise _mismatch(record, str(exc)) from exc
    if record.global_rank != expected:
        raise _mismatch(record, f"got global rank {record.global_rank}, but the coordinates of rank {expected}")
    if record.incarnation < 1:
        raise _mismatch(record, f"got incarnation {record.incarnation}; allowed: 1 or more")


def _check_against(record: RankRecord, known: RankRecord | None, first: RankRecord) -> None:
    if known is not None and known != record:
        raise _mismatch(record, "already registered with different content; a restarted rank needs a new incarnation")
    shared: list[tuple[str, object, object]] = [
        ("sizes", record.sizes, first.sizes),
        ("model", record.geometry.model, first.geometry.model),
        ("page size", record.geometry.page_size, first.geometry.page_size),
        ("KV geometry", record.geometry.digest, first.geometry.digest),
        ("transfer mode", record.transfer_mode, first.transfer_mode),
        ("KV ownership", record.ownership, first.ownership),
        ("build", record.build, first.build),
    ]
    for name, given, registered in shared:
        if given != registered:
            raise _mismatch(record, f"got {name} {given}, but rank {first.global_rank} registered {registered}")


def _mismatch(record: RankRecord, message: str) -> TableRefusedError:
    return TableRefusedError(RefusalCode.MISMATCH, f"{record.replica} {record.coords}: {message}")


class WatchedTable:
    """Table with a clock and watchers. Leases expire by the time for which the service could hear heartbeats."""

    def __init__(self, table: BootstrapTable, clock: Clock) -> None:
        self.table = table
        self._clock = clock
        self._attentive_clock = AttentiveClock(LAG_S)
        self._seen_version = table.urgent_version
        self._changed = asyncio.Event()
        self._closing = False

    def now_s(self) -> float:
        """Return the attentive time, for the table."""
        return self._attentive_clock.look(self._clock.now_s())

    def look(self) -> None:
        """Expire leases, and wake the watchers after an urgent change. The service's loop calls this regularly."""
        self.table.expire(self.now_s())
        self.wake_if_changed()

    def wake_if_changed(self) -> None:
        """Wake the watchers after an urgent change. Call this after every request that may change the table."""
        if self.table.urgent_version != self._seen_version:
            self._seen_version = self.table.urgent_version
            self._wake()

    def close(self) -> None:
        """End all watches; later ones return immediately."""
        self._closing = True
        self._wake()

    async def watch(self, version: int, timeout_s: float) -> TableSnapshot | None:
        """Wait for an urgent change since ``version``; after the timeout, return None if nothing has changed."""
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            changed, left_s = self._changed, deadline_s - self._clock.now_s()
            snapshot, is_over = self.table.snapshot(self.now_s()), left_s <= 0 or self._closing
            if self.table.is_outdated(version) or (is_over and snapshot.version != version):
                return snapshot
            if is_over:
                return None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
