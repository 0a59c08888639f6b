"""Page stores of fake ranks on any backend, with pages whose bytes identify them."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from cluster.spec.ids import Role
from cluster.spec.memory import GIB, pool_layout
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import AxisSizes, KvOwnership, RankRecord
from cluster.spec.tiers import TierPage
from tests.fakes.kv import kv_geometry
from tests.fakes.paged_ranks import record
from transfer.page_assignment import HostShare
from workers.hicache.storage.interface import StorageBackend, StorageObject
from workers.hicache.storage.page_store import PageStore

GEOMETRY = kv_geometry(model="m", num_layers=2, num_kv_heads=4, head_dim=2, dtype="float32", page_size=2)
FOREVER_S = float("inf")


def sizes(cp: int = 1, tp: int = 1, pp: int = 1) -> AxisSizes:
    return AxisSizes(dp=1, cp=cp, tp=tp, pp=pp)


def records_of(of: AxisSizes, ownership: KvOwnership = KvOwnership.REPLICATED) -> list[RankRecord]:
    """Return the ranks of a replica of GEOMETRY."""
    ranks = range(world_size(of))
    return [
        msgspec.structs.replace(
            record(Role.PREFILL, coords_of(rank, of).cp, of.cp, num_pages=1, ownership=ownership),
            coords=coords_of(rank, of),
            sizes=of,
            geometry=GEOMETRY,
            layout=pool_layout(GEOMETRY, of, coords_of(rank, of), 4096 / GIB),
        )
        for rank in ranks
    ]


def page_of(number: int) -> TierPage:
    return TierPage(key=bytes([number]) * 16, index=number, host=number)


def kv_of(page: TierPage) -> np.ndarray:
    """Return a page's KV in the whole model, ``[head, layer, k_or_v, slot, head_dim]``."""
    (group,) = GEOMETRY.groups
    shape = (group.num_heads, GEOMETRY.num_layers, 2, GEOMETRY.page_size, group.parts[0].dim)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * page.key[0]


def part_of(page: TierPage, record: RankRecord) -> np.ndarray:
    """Return a rank's part of a page."""
    (group,) = record.layout.groups
    heads = slice(group.heads.start, group.heads.stop)
    layers = slice(record.layout.layers.start, record.layout.layers.stop)
    return np.ascontiguousarray(kv_of(page)[heads, layers])


def write_one(backend: StorageBackend, name: str, parts: Sequence[memoryview]) -> None:
    """Write one object. Raise its error, if any."""
    (error,) = backend.write([StorageObject(name, parts)])
    if error is not None:
        raise error


def read_one(backend: StorageBackend, name: str, parts: Sequence[memoryview]) -> bool:
    """Read one object. Raise its error, if any."""
    (outcome,) = backend.read([StorageObject(name, parts)])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class RankStore:
    """Page store and host memory of one rank."""

    def __init__(self, backend: StorageBackend, record: RankRecord, weights: str = "w") -> None:
        self.record = record
        self.store = PageStore(backend, record, weights)
        self.memory: dict[int, bytearray] = {}
        self.failures: Counter[str] = Counter()

    def write(self, pages: Sequence[TierPage]) -> list[bool]:
        """Store the pages that this rank owns."""
        owned = [page for page in pages if HostShare.of(self.record).has(page.index)]
        for page in owned:
            self.buffer(page)[:] = part_of(page, self.record).data.cast("B")
        return self.store.store(owned, self.buffer, FOREVER_S, self.failures)

    def read(self, pages: Sequence[TierPage]) -> list[bool]:
        """Fetch pages and check every byte of them."""
        self.memory.clear()
        done = self.store.fetch(pages, self.buffer, FOREVER_S, self.failures)
        for page, is_done in zip(pages, done, strict=True):
            if is_done:
                assert bytes(self.memory[page.index]) == part_of(page, self.record).tobytes(), f"foreign bytes: {page}"
        return done

    def look_up(self, pages: Sequence[TierPage]) -> list[bool]:
        return self.store.look_up(pages, FOREVER_S, self.failures)

    def buffer(self, page: TierPage) -> memoryview:
        return memoryview(self.memory.setdefault(page.index, bytearray(self.record.layout.page_bytes)))
