"""Page copies between device and host memory: every page reaches its slot, no other slot changes, staged or not."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from cluster.spec.ids import Role
from cluster.spec.kv import KvGeometry
from cluster.spec.registry import AxisSizes, KvOwnership, RankCoords
from cluster.spec.tiers import TierPage
from tests.fakes.kv import kv_geometry, two_groups
from tests.fakes.loopback import Loopback
from tests.fakes.page_copies import layout_of
from tests.fakes.paged_ranks import record
from workers.device import Event
from workers.hicache.copier import MOST_LAYER_GROUPS, Copier
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.page_store import PageStore
from workers.memory.layerwise_load import LayerwiseLoad
from workers.memory.page_pool import PagePool
from workers.memory.peer_memory import PeerMemory, TierMemory


class WatchedLoad(LayerwiseLoad):
    """Load that calls a function with the number of layers whenever layers are reported."""

    def __init__(self, look: Callable[[int], None]) -> None:
        super().__init__()
        self.num_layers = 0
        self._look = look

    def add(self, num_layers: int, event: Event | None) -> None:
        self.num_layers += num_layers
        self._look(self.num_layers)
        super().add(num_layers, event)


NUM_PAGES, HOST_PAGES = 7, 4
ONE_GROUP = kv_geometry()


class Replica:
    """Ranks whose pages have different bytes."""

    def __init__(
        self, cp: int, ownership: KvOwnership, *, is_staged: bool, geometry: KvGeometry = ONE_GROUP, tp: int = 1
    ) -> None:
        """Create the ranks. With one head, TP ranks hold the same pages."""
        self.loopback = Loopback()
        layout = layout_of(geometry, NUM_PAGES)
        self.regions = [self.loopback.allocate(layout.pool_bytes) for _ in range(cp * tp)]
        hosts = [self.loopback.allocate(HOST_PAGES * layout.page_bytes) for _ in range(cp * tp)]
        self.records = [
            msgspec.structs.replace(
                record(Role.PREFILL, rank // tp, cp, NUM_PAGES, ownership=ownership),
                coords=RankCoords(dp=0, cp=rank // tp, tp=rank % tp, pp=0),
                sizes=AxisSizes(dp=1, cp=cp, tp=tp, pp=1),
                global_rank=rank,
                host_endpoint=host.endpoint,
                geometry=geometry,
                layout=layout,
            )
            for rank, host in enumerate(hosts)
        ]
        self.pools = []
        self.copiers = []
        torch.manual_seed(1)
        for rank, (region, host) in enumerate(zip(self.regions, hosts, strict=True)):
            memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
            pool = PagePool(layout, torch.zeros_like(memory) if is_staged else memory)
            pool.bytes.copy_(torch.randint(1, 256, pool.bytes.shape))
            self.pools.append(pool)
            self.copiers.append(Copier(self.records, rank, TierMemory(PeerMemory(pool, region), host), self.loopback))

    def order(self, kind: str, pages: Sequence[TierPage]) -> None:
        for copier in self.copiers:
            getattr(copier, kind)(pages, copier.memory.record_event())

    def page(self, rank: int, page: int) -> bytes:
        return self.pools[rank].bytes[page].numpy().tobytes()


def page_of(index: int, device: int, host: int) -> TierPage:
    return TierPage(key=bytes([index]), index=index, device=device, host=host)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_replicated_pages_are_loaded_on_every_rank(cp: int, *, is_staged: bool) -> None:
    replica = Replica(cp, KvOwnership.REPLICATED, is_staged=is_staged)
    for pool in replica.pools[1:]:
        pool.bytes.copy_(replica.pools[0].bytes)
    before = [replica.page(0, page) for page in range(NUM_PAGES)]
    hosts = {0: 2, 1: 5, 2: 0} if cp == 2 else {0: 2, 1: 3, 2: 0}
    replica.order("save", [page_of(index, index + 1, host) for index, host in hosts.items()])
    for index, host in hosts.items():
        owner = replica.copiers[index % cp]
        assert bytes(owner.host_page(page_of(index, 0, host))) == before[index + 1]
    for pool in replica.pools:
        pool.bytes[1:4].zero_()
    replica.order("load", [page_of(index, 6 - index, host) for index, host in hosts.items()])
    zeros = bytes(len(before[0]))
    for rank in range(cp):
        expected = [before[0], zeros, zeros, zeros, before[3], before[2], before[1]]
        assert [replica.page(rank, page) for page in range(NUM_PAGES)] == expected


@pytest.mark.parametrize("num_layers", [2, MOST_LAYER_GROUPS, MOST_LAYER_GROUPS + 3])
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("make", [two_groups, kv_geometry])
def test_layers_are_loaded_in_order(
    cp: int, num_layers: int, make: Callable[..., KvGeometry], *, is_staged: bool
) -> None:
    replica = Replica(cp, KvOwnership.REPLICATED, is_staged=is_staged, geometry=make(num_layers=num_layers))
    for pool in replica.pools[1:]:
        pool.bytes.copy_(replica.pools[0].bytes)
    before = replica.pools[0].bytes.clone()
    # Each host page belongs to its owner's rank.
    saved = [page_of(index, index + 1, index % cp + cp * (index // cp)) for index in range(3)]
    replica.order("save", saved)
    wanted = [page_of(page.index, 6 - page.index, page.host or 0) for page in saved]
    for rank, copier in enumerate(replica.copiers):
        pool = replica.pools[rank]
        pool.bytes[4:].zero_()
        reported: list[int] = []

        def look(num_there: int, pool: PagePool = pool, reported: list[int] = reported) -> None:
            reported.append(num_there)
            for layers, is_there in ((range(num_there), True), (range(num_there, num_layers), False)):
                pages = pool.at([], layers).range
                for now, then in zip(pages.views(pool.bytes), pages.views(before), strict=True):
                    for index in range(3):
                        assert torch.equal(now[6 - index], then[index + 1] if is_there else torch.zeros_like(now[0]))

        load = WatchedLoad(look)
        assert copier.load_layerwise(wanted, copier.memory.record_event(), load) == 3 * pool.page_bytes
        assert reported[-1] == num_layers
        assert len(reported) <= MOST_LAYER_GROUPS
        assert torch.equal(pool.bytes[:4], before[:4])


@pytest.mark.parametrize("of_peers", [False, True])
def test_pages_of_peers_are_read_once_their_pages_in_the_region_are_free(*, of_peers: bool) -> None:
    """Earlier pages in the region may still be on their way to the GPU."""
    replica = Replica(2, KvOwnership.REPLICATED, is_staged=True, geometry=kv_geometry(num_layers=2))
    calls: list[str] = []
    event: Any = SimpleNamespace(synchronize=lambda: calls.append("what was there is on the GPU"))
    load = WatchedLoad(lambda num_layers: calls.append(f"{num_layers} layers are there"))
    replica.copiers[0].load_layerwise([page_of(int(of_peers), 1, int(of_peers))], event, load)
    waits = ["what was there is on the GPU"] if of_peers else []
    assert calls == [*waits, "1 layers are there", "2 layers are there"]


@pytest.mark.parametrize("is_staged", [False, True])
def test_sharded_pages_are_loaded_on_their_owners(*, is_staged: bool) -> None:
    replica = Replica(2, KvOwnership.SHARDED, is_staged=is_staged)
    before = [replica.page(rank, page) for page in range(NUM_PAGES) for rank in range(2)]
    replica.order("save", [page_of(index, index, index) for index in range(4)])
    for pool in replica.pools:
        pool.bytes[:2].zero_()
    replica.order("load", [page_of(index, index + 8, index) for index in range(4)])
    after = [replica.page(rank, page) for page in range(NUM_PAGES) for rank in range(2)]
    zeros = bytes(len(before[0]))
    assert after == [zeros] * 4 + before[4:8] + before[:4] + before[12:]


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("ownership", KvOwnership)
@pytest.mark.parametrize("cp", [1, 2])
def test_ranks_with_the_same_heads_keep_one_copy(cp: int, ownership: KvOwnership, *, is_staged: bool) -> None:
    tp = 2
    replica = Replica(cp, ownership, is_staged=is_staged, tp=tp)
    is_sharded = ownership is KvOwnership.SHARDED
    for rank, pool in enumerate(replica.pools):
        pool.bytes.copy_(replica.pools[rank // tp * tp if is_sharded else 0].bytes)
    before = [pool.bytes.clone() for pool in replica.pools]
    # Page numbers of a sharded pool are global, and have the same owner as the index.
    pages = [page_of(index, index, index) for index in range(4)]
    replica.order("save", pages)
    for page in pages:
        owners = [rank for rank, copier in enumerate(replica.copiers) if copier.owns(page)]
        assert len(owners) == 1, "several ranks keep a page"
    for pool in replica.pools:
        pool.bytes.zero_()
    replica.order("load", pages)
    held = range(4 // cp) if is_sharded else range(4)
    for pool, earlier in zip(replica.pools, before, strict=True):
        assert torch.equal(pool.bytes[held.start : held.stop], earlier[held.start : held.stop])
        assert not pool.bytes[held.stop :].any(), "a page that nobody asked for was written to"


def test_saving_a_page_does_not_touch_its_slot_in_the_region() -> None:
    """A peer may be writing to the page for its next owner."""
    replica = Replica(1, KvOwnership.REPLICATED, is_staged=True)
    before = bytes(replica.regions[0].buffer)
    replica.order("save", [page_of(0, 3, 1)])
    replica.order("load", [page_of(0, 2, 1)])
    assert bytes(replica.regions[0].buffer) == before


@pytest.mark.parametrize("is_staged", [False, True])
def test_pages_with_two_kv_groups_are_read_from_files(tmp_path: Path, *, is_staged: bool) -> None:
    pages = [page_of(index, index + 1, index) for index in range(3)]
    failures = Counter[str]()

    def made() -> tuple[Replica, PageStore]:
        replica = Replica(1, KvOwnership.REPLICATED, is_staged=is_staged, geometry=two_groups())
        return replica, PageStore(FileStorage(tmp_path, 1 << 20), replica.records[0], "weights")

    writer, store = made()
    writer.order("save", pages)
    assert store.store(pages, writer.copiers[0].host_page, float("inf"), failures) == [True] * 3
    reader, store = made()
    reader.pools[0].bytes.zero_()
    assert store.fetch(pages, reader.copiers[0].host_page, float("inf"), failures) == [True] * 3
    reader.order("load", pages)
    assert [reader.page(0, page) for page in (1, 2, 3)] == [writer.page(0, page) for page in (1, 2, 3)]
    assert not any(reader.page(0, 0)), "a page that nobody asked for was written to"
    assert not failures
