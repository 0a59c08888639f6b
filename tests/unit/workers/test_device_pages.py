"""Pages between a device and host memory: each in its place, no other touched, whether they are staged or not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from cluster.spec.kv import PoolLayout
from cluster.spec.lifecycle import Role
from cluster.spec.registry import KvOwnership
from cluster.spec.tiers import TierPage
from tests.fakes.loopback import Loopback
from tests.fakes.paged_ranks import row
from tests.fakes.watched_arrivals import WatchedArrivals
from transfer.backends.interface import Region
from workers.cache.page_pool import PagePool
from workers.cache.staging import Staging
from workers.hicache.copier import Copier
from workers.hicache.device_pages import MOST_GROUPS, DevicePages, RegionPages, StagedPages

NUM_PAGES, HOST_PAGES = 7, 4


class Replica:
    """Ranks whose pages are full of different bytes."""

    def __init__(
        self, cp: int, ownership: KvOwnership, *, is_staged: bool, num_heads: int = 1, num_layers: int = 1
    ) -> None:
        self.loopback = Loopback()
        rows = [row(Role.PREFILL, rank, cp, NUM_PAGES, ownership=ownership) for rank in range(cp)]
        layout = msgspec.structs.replace(rows[0].layout, num_heads=num_heads, num_layers=num_layers)
        self.regions = [self.loopback.allocate(layout.pool_bytes) for _ in rows]
        self.hosts = [self.loopback.allocate(HOST_PAGES * layout.page_bytes) for _ in rows]
        rows = [
            msgspec.structs.replace(row, host_endpoint=host.endpoint, layout=layout)
            for row, host in zip(rows, self.hosts, strict=True)
        ]
        self.pools = [self._pool(region, layout, is_staged=is_staged) for region in self.regions]
        self.copiers = []
        self.devices: list[DevicePages] = []
        for rank, (region, host, pool) in enumerate(zip(self.regions, self.hosts, self.pools, strict=True)):
            device: DevicePages = RegionPages(region, host, layout)
            if is_staged:
                device = StagedPages(pool, Staging(pool, region.buffer), region, host, layout)
            self.devices.append(device)
            self.copiers.append(Copier(rows, rank, device, region, host, self.loopback))
        torch.manual_seed(1)
        for pool in self.pools:
            pool.data.copy_(torch.randn(pool.data.shape))

    def order(self, kind: str, pages: Sequence[TierPage]) -> None:
        for copier in self.copiers:
            getattr(copier, kind)(pages, copier.record_event())

    def page(self, rank: int, page: int) -> bytes:
        return self.pools[rank].data[page].numpy().tobytes()

    @staticmethod
    def _pool(region: Region, layout: PoolLayout, *, is_staged: bool) -> PagePool:
        memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
        sizes = (NUM_PAGES, layout.num_heads, layout.num_layers, layout.page_size, layout.head_dim)
        return PagePool(*sizes, torch.float32, torch.zeros_like(memory) if is_staged else memory)


def page_of(index: int, device: int, host: int) -> TierPage:
    return TierPage(key=bytes([index]), index=index, device=device, host=host)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_replicated_pages_come_back_on_every_rank(cp: int, *, is_staged: bool) -> None:
    replica = Replica(cp, KvOwnership.REPLICATED, is_staged=is_staged)
    for pool in replica.pools[1:]:
        pool.data.copy_(replica.pools[0].data)
    before = [replica.page(0, page) for page in range(NUM_PAGES)]
    hosts = {0: 2, 1: 5, 2: 0} if cp == 2 else {0: 2, 1: 3, 2: 0}
    replica.order("save", [page_of(place, place + 1, host) for place, host in hosts.items()])
    for place, host in hosts.items():
        owner = replica.copiers[place % cp]
        assert bytes(owner.host_page(page_of(place, 0, host))) == before[place + 1]
    for pool in replica.pools:
        pool.data[1:4].zero_()
    replica.order("load", [page_of(place, 6 - place, host) for place, host in hosts.items()])
    zeros = bytes(len(before[0]))
    for rank in range(cp):
        expected = [before[0], zeros, zeros, zeros, before[3], before[2], before[1]]
        assert [replica.page(rank, page) for page in range(NUM_PAGES)] == expected


@pytest.mark.parametrize("num_layers", [1, MOST_GROUPS, MOST_GROUPS + 3])
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("cp", [2, 3])
def test_what_peers_have_comes_layer_after_layer_too(cp: int, num_layers: int, *, is_staged: bool) -> None:
    replica = Replica(cp, KvOwnership.REPLICATED, is_staged=is_staged, num_heads=3, num_layers=num_layers)
    for pool in replica.pools[1:]:
        pool.data.copy_(replica.pools[0].data)
    before = replica.pools[0].data.clone()
    # The host page of a place is one of its owner's.
    saved = [page_of(place, place + 1, place % cp + cp * (place // cp)) for place in range(3)]
    replica.order("save", saved)
    wanted = [page_of(page.index, 6 - page.index, page.host or 0) for page in saved]
    for rank, copier in enumerate(replica.copiers):
        pool = replica.pools[rank]
        pool.data[4:].zero_()

        def look(num_there: int, pool: PagePool = pool) -> None:
            for place in range(3):
                assert torch.equal(pool.data[6 - place, :, :num_there], before[place + 1, :, :num_there])
                assert not pool.data[6 - place, :, num_there:].any()

        arrivals = WatchedArrivals(look)
        assert copier.load_layerwise(wanted, copier.record_event(), arrivals) == 3 * copier.page_bytes
        assert arrivals.num_layers == num_layers
        assert torch.equal(pool.data[:4], before[:4])


@pytest.mark.parametrize("elsewhere", [[], [2, 3]], ids=["of its own alone", "of peers too"])
def test_what_peers_have_is_read_once_their_places_in_the_region_are_free(elsewhere: list[int]) -> None:
    """What arrived there before may be on its way to the GPU yet."""
    replica = Replica(1, KvOwnership.REPLICATED, is_staged=True, num_layers=MOST_GROUPS)
    calls: list[str] = []
    moment: Any = SimpleNamespace(synchronize=lambda: calls.append("what was there is on the GPU"))
    arrivals = WatchedArrivals(lambda num_layers: calls.append(f"{num_layers} layers are there"))
    replica.devices[0].load_layerwise(
        [(1, 0)], elsewhere, lambda layers: calls.append(f"read {layers.start}"), moment, arrivals
    )
    waits = ["what was there is on the GPU"] if elsewhere else []
    layers = [call for first in range(MOST_GROUPS) for call in (f"read {first}", f"{first + 1} layers are there")]
    assert calls == waits + layers


@pytest.mark.parametrize("is_staged", [False, True])
def test_sharded_pages_come_back_on_their_owners(*, is_staged: bool) -> None:
    replica = Replica(2, KvOwnership.SHARDED, is_staged=is_staged)
    before = [replica.page(rank, page) for page in range(NUM_PAGES) for rank in range(2)]
    replica.order("save", [page_of(place, place, place) for place in range(4)])
    for pool in replica.pools:
        pool.data[:2].zero_()
    replica.order("load", [page_of(place, place + 8, place) for place in range(4)])
    after = [replica.page(rank, page) for page in range(NUM_PAGES) for rank in range(2)]
    zeros = bytes(len(before[0]))
    assert after == [zeros] * 4 + before[4:8] + before[:4] + before[12:]


def test_a_page_that_is_saved_leaves_its_place_in_the_region_alone() -> None:
    """A peer may be writing there, for whoever has the page by now."""
    replica = Replica(1, KvOwnership.REPLICATED, is_staged=True)
    before = bytes(replica.regions[0].buffer)
    replica.order("save", [page_of(0, 3, 1)])
    replica.order("load", [page_of(0, 2, 1)])
    assert bytes(replica.regions[0].buffer) == before
