"""A rank table made by hand, and a watch of it that follows it without a service."""

import asyncio
import threading
from collections.abc import AsyncIterator

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Role
from cluster.spec.registry import (
    AxisSizes,
    Endpoint,
    KvOwnership,
    RankCoords,
    RankRow,
    ReplicaEntry,
    ReplicaLoad,
    TableSnapshot,
    TransferMode,
)
from tests.fakes.kv import kv_geometry, kv_layout

_ONE = AxisSizes(dp=1, cp=1, tp=1, pp=1)
_FIRST = RankCoords(dp=0, cp=0, tp=0, pp=0)
_GEOMETRY = kv_geometry(model="fake", num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", page_size=4)
_LAYOUT = kv_layout(
    num_pages=4, first_head=0, num_heads=1, first_layer=0, num_layers=1, page_size=4, head_dim=2, itemsize=4
)


def peer_of(replica: str, incarnation: int = 1, address: str = "") -> Peer:
    """A replica; its address is made from its name unless one is given."""
    return Peer(
        replica=ReplicaId(replica),
        incarnation=Incarnation(incarnation),
        address=address or f"tcp://{replica}.{incarnation}:1",
    )


def row_of(peer: Peer) -> RankRow:
    """The one row of a replica of one rank."""
    return RankRow(
        replica=peer.replica,
        role=Role(peer.replica.split("-")[0]),
        incarnation=peer.incarnation,
        coords=_FIRST,
        sizes=_ONE,
        global_rank=0,
        address=peer.address,
        endpoint=Endpoint(backend="fake", session="", base_address=0, num_bytes=0),
        geometry=_GEOMETRY,
        layout=_LAYOUT,
        transfer_mode=TransferMode.ALL_RANKS,
        ownership=KvOwnership.REPLICATED,
        build="test",
    )


def entry_of(peer: Peer, *, ready: bool = True, draining: bool = False, total_pages: int = 0) -> ReplicaEntry:
    """A replica's entry; the fake rows have pages of 4 tokens."""
    return ReplicaEntry(
        replica=peer.replica,
        role=row_of(peer).role,
        incarnation=peer.incarnation,
        ready=ready,
        rows=(row_of(peer),),
        load=ReplicaLoad(draining=draining, total_pages=total_pages),
    )


def table_of(*entries: ReplicaEntry, version: int = 1, reaped: dict[str, int] | None = None) -> TableSnapshot:
    """A snapshot."""
    gone = {ReplicaId(replica): Incarnation(incarnation) for replica, incarnation in (reaped or {}).items()}
    return TableSnapshot(version=version, replicas=entries, reaped=gone)


class FakeTable:
    """One table for one watcher in another thread."""

    def __init__(self) -> None:
        self._snapshots: list[TableSnapshot] = []
        self._lock = threading.Lock()
        self._watcher: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def show(self, snapshot: TableSnapshot) -> None:
        """The table is now this."""
        with self._lock:
            self._snapshots.append(snapshot)
            if self._watcher is not None:
                loop, changed = self._watcher
                loop.call_soon_threadsafe(changed.set)

    async def watch(self, url: str, token: str) -> AsyncIterator[TableSnapshot]:
        """Stands in for ``cluster.bootstrap.client.watch_table``."""
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
            await changed.wait()
