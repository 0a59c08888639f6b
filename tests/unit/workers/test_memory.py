"""Page copies between memories: every page reaches its slot, and no other slot changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.kv import PoolLayout
from tests.fakes.kv import kv_geometry, two_groups
from tests.fakes.loopback import Loopback
from tests.fakes.page_copies import check_copies, layout_of
from tests.fakes.thread_group import on_thread_ranks
from transfer.page_range import PageRange
from workers.memory import peer_memory
from workers.memory.page_pool import PagePool
from workers.memory.peer_memory import PeerMemory
from workers.parallel.communicator import Communicator

NUM_PAGES = 12
LAYOUTS = [layout_of(kv_geometry(num_layers=2, head_dim=3), NUM_PAGES), layout_of(two_groups(), NUM_PAGES)]


@given(st.data())
def test_pages_are_where_they_belong(data: st.DataObject) -> None:
    check_copies(data, torch.device("cpu"))


def staged(layout: PoolLayout) -> PeerMemory:
    """Return a pool of random bytes, separate from its region, which is full of ones."""
    region = Loopback().allocate(layout.pool_bytes + 100)
    torch.frombuffer(region.buffer, dtype=torch.uint8).fill_(1)
    pool = PagePool(layout, torch.randint(2, 256, (layout.pool_bytes,), dtype=torch.uint8))
    memory = PeerMemory(pool, region)
    assert memory.host is not None
    return memory


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one group", "two groups"])
@given(pages=st.lists(st.integers(0, NUM_PAGES - 1), unique=True), first=st.integers(0, 3), last=st.integers(0, 4))
def test_published_layers_are_on_the_host_and_no_others(
    layout: PoolLayout, pages: list[int], first: int, last: int
) -> None:
    memory = staged(layout)
    layers = range(first, min(last, layout.num_layers))
    memory.publish(PageRange(layout, pages, layers), memory.event())
    assert memory.host is not None
    pages_of = memory.pool.at([], layers).range
    views = zip(pages_of.views(memory.host.bytes), pages_of.views(memory.pool.bytes), strict=True)
    for host, pool in views:
        for page in range(NUM_PAGES + 1):
            assert torch.equal(host[page], pool[page] if page in pages else torch.ones_like(pool[page]))
    written = sum(group.num_heads * group.layer_bytes * len(set(group.layers) & set(layers)) for group in layout.groups)
    assert int((memory.host.bytes != 1).sum()) == written * len(pages)


@given(st.lists(st.integers(0, NUM_PAGES - 1), unique=True))
def test_received_pages_are_copied_from_the_host(pages: list[int]) -> None:
    memory = staged(LAYOUTS[1])
    before = memory.pool.bytes.clone()
    memory.receive(pages)
    for page in range(NUM_PAGES + 1):
        expected = torch.ones_like(before[page]) if page in pages else before[page]
        assert torch.equal(memory.pool.bytes[page], expected)


def sent_pool(sent: list[int]) -> PagePool:
    """Return a pool with the number of each sent page, and zeros elsewhere."""
    pool = PagePool(LAYOUTS[1])
    for page in sent:
        pool.bytes[page] = page + 1
    return pool


def received(size: int, pages: list[int]) -> list[PagePool]:
    """Return the pool of every rank with the same heads. Each rank has received its part of the pages."""

    def rank(group: Communicator) -> PagePool:
        pool = sent_pool([page for page in pages if page % size == group.rank])
        region = Loopback().allocate(0)
        PeerMemory(pool, region, group).receive(pages)
        return pool

    return on_thread_ranks(size, rank)


@given(st.integers(1, 4), st.lists(st.integers(0, NUM_PAGES - 1), max_size=NUM_PAGES))
def test_every_rank_with_the_same_heads_has_every_page(size: int, pages: list[int]) -> None:
    for pool in received(size, pages):
        assert torch.equal(pool.bytes, sent_pool(pages).bytes)


def test_large_gathers_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_MOST_SPREAD_BYTES", 2 * LAYOUTS[1].page_bytes)
    pages = list(range(NUM_PAGES))
    for pool in received(2, pages):
        assert torch.equal(pool.bytes, sent_pool(pages).bytes)
