"""Pages between a GPU and pinned host memory, and tokens that are drawn on one: `pytest -m gpu tests/gpu`."""

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.kv import PoolLayout
from cluster.spec.registry import Endpoint
from cluster.spec.sampling import Sampling
from tests.fakes.page_copies import check_copies
from transfer.backends.interface import Region
from workers.cache import page_copies
from workers.cache.layer_arrivals import LayerArrivals
from workers.cache.page_pool import PagePool
from workers.cache.pinned import PinnedMemory
from workers.cache.staging import Staging
from workers.engine import sampler
from workers.hicache.device_pages import StagedPages

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LAYOUT = PoolLayout(
    num_pages=8, first_head=0, num_heads=2, first_layer=0, num_layers=9, page_size=16, head_dim=64, itemsize=2
)
_SLEEP_CYCLES = 100_000_000
"""Some 50 ms, in which nobody may look at pages."""


class World(NamedTuple):
    """A pool, and host memory of both kinds."""

    pool: PagePool
    staging: Staging
    staged: Tensor
    pages: StagedPages
    host: Tensor

    def write_late(self, pages: list[int]) -> Tensor:
        """Write random numbers to pages, after a while; the pages as they will be."""
        new = torch.randn(len(pages), *self.pool.data.shape[1:]).to(self.pool.data.dtype)
        there, rows = new.to(DEVICE), torch.tensor(pages, device=DEVICE)
        if DEVICE == "cuda":
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        self.pool.data[rows] = there
        return new


def make_region(num_bytes: int) -> Region:
    """Whole pages of the system, as whoever pins them needs."""
    endpoint = Endpoint(backend="none", session="none", base_address=0, num_bytes=num_bytes)
    return Region(memoryview(mmap.mmap(-1, num_bytes)), endpoint)


@pytest.fixture(params=["engine", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are small here: those of models are copied in one way or the other."""
    if request.param == "engine":
        monkeypatch.setattr(page_copies, "LEAST_PIECE_BYTES", 0)


@pytest.fixture
def world(way: None) -> Iterator[World]:  # noqa: ARG001 - it is asked while pages are copied
    sizes = (LAYOUT.num_pages, LAYOUT.num_heads, LAYOUT.num_layers, LAYOUT.page_size, LAYOUT.head_dim)
    pool = PagePool(*sizes, torch.bfloat16, device=torch.device(DEVICE))
    region, host = make_region(LAYOUT.pool_bytes), make_region(4 * LAYOUT.page_bytes)
    pinned = PinnedMemory([region.buffer, host.buffer] if DEVICE == "cuda" else [])
    staging = Staging(pool, region.buffer)
    staged, kept = (
        torch.frombuffer(each.buffer, dtype=torch.bfloat16).view(-1, *pool.data.shape[1:]) for each in (region, host)
    )
    yield World(pool, staging, staged, StagedPages(pool, staging, region, host, LAYOUT), kept)
    pinned.close()


def test_pages_leave_when_they_are_written(world: World) -> None:
    expected = world.write_late([5, 1, 3])
    moment = world.staging.mark()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(world.staging.put_out, [5, 1, 3], slice(None), moment).result()
    assert torch.equal(world.staged[[5, 1, 3]], expected)
    assert not world.staged[[0, 2, 4, 6, 7]].any()


def test_layers_leave_when_they_are_written(world: World) -> None:
    expected = world.write_late([5, 1])
    moment = world.staging.mark()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(world.staging.put_out, [5, 1], slice(2, 6), moment).result()
    assert torch.equal(world.staged[[5, 1], :, 2:6], expected[:, :, 2:6])
    assert not world.staged[:, :, :2].any()
    assert not world.staged[:, :, 6:].any()


def test_pages_are_there_for_what_is_started_next(world: World) -> None:
    expected = torch.randn(2, *world.pool.data.shape[1:]).to(torch.bfloat16)
    world.staged[[6, 2]] = expected
    world.staging.take_in([6, 2])
    assert torch.equal(world.pool.data[[6, 2]].cpu(), expected)


def test_tiers_keep_pages_and_bring_them_back(world: World) -> None:
    expected = world.write_late([1, 2, 3])
    moment = world.pages.record_event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(world.pages.save, [(1, 2), (2, 0), (3, 3)], moment).result()
        assert torch.equal(world.host[[2, 0, 3]], expected)
        world.write_late([4, 5, 6])
        thread.submit(world.pages.load, [(4, 2), (5, 0), (6, 3)], world.pages.record_event()).result()
    assert torch.equal(world.pool.data[4:7].cpu(), expected)


def test_layers_are_read_while_others_come(world: World) -> None:
    world.host.copy_(torch.randn(world.host.shape))
    world.staged[7] = 3.0
    arrivals, moment = LayerArrivals(), world.pages.record_event()
    with ThreadPoolExecutor(1) as thread, world.pool.in_step(arrivals):
        filled = thread.submit(world.pages.fill, [(0, 1), (4, 3)], [7], lambda _: None, moment, arrivals)
        seen = [torch.stack(world.pool.layer_view(layer), dim=2)[[0, 4, 7]].cpu() for layer in range(LAYOUT.num_layers)]
        filled.result()
    expected = torch.cat([world.host[[1, 3]], world.staged[[7]]])
    assert torch.equal(torch.stack(seen, dim=2), expected)


@settings(max_examples=50)
@given(st.data())
def test_pages_are_where_they_belong(data: st.DataObject) -> None:
    check_copies(data, torch.device(DEVICE))


def test_tokens_are_those_that_a_cpu_draws() -> None:
    rows = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_p=0.9, seed=2),
        Sampling(temperature=1.0, top_k=40, seed=3),
        Sampling(temperature=1.5, top_k=2000, top_p=0.8, min_p=0.01, seed=4),
        Sampling(temperature=3.0, top_p=0.99, seed=5),
    ] * 8
    logits = 3 * torch.randn(len(rows), 50_000, generator=torch.Generator().manual_seed(0))
    positions = list(range(len(rows)))
    drawn = sampler.draw(logits.to(DEVICE), rows, positions)
    assert drawn.tolist() == sampler.draw(logits, rows, positions).tolist()
