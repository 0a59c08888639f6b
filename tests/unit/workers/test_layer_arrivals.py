"""Layers of pages that come from host memory while a step reads them: each is waited for, and none before its turn."""

import threading
from functools import partial

import msgspec
import pytest
import torch

from cluster.spec.lifecycle import Role
from tests.fakes.loopback import Loopback
from tests.fakes.paged_ranks import row
from tests.fakes.watched_arrivals import WatchedArrivals
from transfer.backends.interface import Region
from workers.cache.layer_arrivals import LayerArrivals
from workers.cache.page_pool import PagePool
from workers.cache.staging import Staging
from workers.hicache.device_pages import MOST_GROUPS, DevicePages, RegionPages, StagedPages

NUM_PAGES, HOST_PAGES, NUM_HEADS = 5, 4, 2
PAIRS = [(1, 3), (4, 0)]
"""Pages on the device, and those that they come from."""
LAYOUT = msgspec.structs.replace(row(Role.PREFILL, 0, 1, NUM_PAGES).layout, num_heads=NUM_HEADS)


@pytest.mark.parametrize("num_layers", [1, MOST_GROUPS - 1, MOST_GROUPS, 2 * MOST_GROUPS + 3])
@pytest.mark.parametrize("is_staged", [False, True])
def test_layers_come_one_after_another(num_layers: int, *, is_staged: bool) -> None:
    layout = msgspec.structs.replace(LAYOUT, num_layers=num_layers)
    loopback = Loopback()
    region, host = loopback.allocate(layout.pool_bytes), loopback.allocate(HOST_PAGES * layout.page_bytes)
    pool, source = make_pool(region, num_layers, is_staged=is_staged), make_pool(host, num_layers, is_staged=False)
    source.data.copy_(torch.rand(source.data.shape))
    before = pool.data.clone()
    device: DevicePages = RegionPages(region, host, layout)
    if is_staged:
        device = StagedPages(pool, Staging(pool, region.buffer), region, host, layout)
    told: list[int] = []

    def look(num_there: int) -> None:
        told.append(num_there)
        for page, slot in PAIRS:
            assert torch.equal(pool.data[page, :, :num_there], source.data[slot, :, :num_there])
            assert torch.equal(pool.data[page, :, num_there:], before[page, :, num_there:])

    device.load_layerwise(PAIRS, [], lambda _: None, device.record_event(), WatchedArrivals(look))
    assert told[-1] == num_layers
    assert len(told) <= MOST_GROUPS
    assert all(torch.equal(pool.data[page], before[page]) for page in (0, 2, 3))


def make_pool(region: Region, num_layers: int, *, is_staged: bool) -> PagePool:
    memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
    num_pages = len(memory) // (LAYOUT.page_bytes * num_layers) - 1
    own = torch.zeros_like(memory) if is_staged else memory
    return PagePool(num_pages, NUM_HEADS, num_layers, LAYOUT.page_size, LAYOUT.head_dim, torch.float32, own)


@pytest.mark.parametrize("reads", ["layer_view", "read_pages"])
def test_a_layer_is_read_when_it_is_there_and_the_end_is_that_of_all(reads: str) -> None:
    pool, arrivals = PagePool(3, 1, 3, 4, 1, torch.float32), LayerArrivals()
    done: list[int] = []
    grown = threading.Condition()

    def note(number: int) -> None:
        with grown:
            done.append(number)
            grown.notify_all()

    def num_done_is(number: int) -> bool:
        return len(done) == number

    def compute() -> None:
        with pool.in_step(arrivals):
            for layer in range(2):
                if reads == "layer_view":
                    pool.layer_view(layer)
                else:
                    pool.read_pages(layer, torch.tensor([1]), torch.empty(4, 2, 1, 1))
                note(layer)
        note(2)
        pool.layer_view(0)

    thread = threading.Thread(target=compute)
    thread.start()
    for layer in range(3):
        with grown:
            assert grown.wait_for(partial(num_done_is, layer), 60)
        thread.join(0.05)
        assert done == list(range(layer)), "it did not wait"
        arrivals.note(1, None)
    thread.join()
    assert done == [0, 1, 2]


def test_a_copy_that_failed_ends_the_step_with_its_error() -> None:
    pool, arrivals = PagePool(3, 1, 2, 4, 1, torch.float32), LayerArrivals()
    arrivals.note(1, None)
    arrivals.fail(OSError("the memory is gone"))
    with pytest.raises(OSError, match="the memory is gone"), pool.in_step(arrivals):
        pool.layer_view(1)
    pool.layer_view(1)
