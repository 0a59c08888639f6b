"""Handmade rank tables, and a watch of them without a service."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from cluster.spec.ids import Incarnation, Peer, ReplicaId
from cluster.spec.registry import RankRecord, ReplicaEntry, ReplicaLoad, TableSnapshot
from tests.fakes.rank_records import make_record, sizes


def peer_of(replica: str, incarnation: int = 1, address: str = "") -> Peer:
    """Return a replica. Without an address, one is derived from its name."""
    return Peer(
        replica=ReplicaId(replica),
        incarnation=Incarnation(incarnation),
        address=address or f"tcp://{replica}.{incarnation}:1",
    )


def record_of(peer: Peer) -> RankRecord:
    """Return the only rank record of a replica with one rank."""
    return make_record(peer.replica, 0, sizes(), peer.incarnation, address=peer.address)


def entry_of(peer: Peer, *, ready: bool = True, draining: bool = False, total_pages: int = 0) -> ReplicaEntry:
    """Return a replica's entry. Fake ranks have pages of 4 tokens."""
    return ReplicaEntry(
        replica=peer.replica,
        incarnation=peer.incarnation,
        ready=ready,
        ranks=(record_of(peer),),
        load=ReplicaLoad(draining=draining, total_pages=total_pages),
    )


def table_of(*entries: ReplicaEntry, version: int = 1, reaped: dict[str, int] | None = None) -> TableSnapshot:
    gone = {ReplicaId(replica): Incarnation(incarnation) for replica, incarnation in (reaped or {}).items()}
    return TableSnapshot(version=version, replicas=entries, reaped=gone)


class FakeTable:
    """Rank table for one watcher in another thread."""

    def __init__(self) -> None:
        self._snapshots: list[TableSnapshot] = []
        self._lock = threading.Lock()
        self._watcher: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def show(self, snapshot: TableSnapshot) -> None:
        """Replace the table."""
        with self._lock:
            self._snapshots.append(snapshot)
            if self._watcher is not None:
                loop, changed = self._watcher
                loop.call_soon_threadsafe(changed.set)

    async def watch(self, url: str, token: str, poll_s: Callable[[], float]) -> AsyncIterator[TableSnapshot | None]:
        """Yield snapshots in place of ``cluster.bootstrap.client.follow_table_async``."""
        assert url.startswith("http")
        assert token
        changed = asyncio.Event()
        with self._lock:
            self._watcher = asyncio.get_running_loop(), changed
        while True:
            with self._lock:
                news, self._snapshots = self._snapshots, []
                changed.clear()
            for snapshot in news:
                yield snapshot
            if not news:
                yield None
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), poll_s())
