"""Page copies between a GPU and pinned host memory, and sampling on a GPU: `pytest -m gpu tests/gpu`."""

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.ids import Role
from cluster.spec.registry import Endpoint
from cluster.spec.sampling import Sampling
from cluster.spec.tiers import TierPage
from tests.fakes.kv import kv_layout
from tests.fakes.loopback import Loopback
from tests.fakes.page_copies import check_copies
from tests.fakes.paged_ranks import record
from transfer.backends.interface import Region
from transfer.page_range import PageRange
from workers.engine import sampler
from workers.hicache.copier import Copier
from workers.memory import copy as memory_copy
from workers.memory.copy import PinnedMemory
from workers.memory.layerwise_load import LayerwiseLoad
from workers.memory.page_pool import PagePool
from workers.memory.peer_memory import PeerMemory, TierMemory

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LAYOUT = kv_layout(
    num_pages=8, first_head=0, num_heads=2, first_layer=0, num_layers=9, page_size=16, head_dim=64, itemsize=2
)
_SLEEP_CYCLES = 100_000_000
"""About 50 ms, during which nobody may read pages."""


class World(NamedTuple):
    """Device pool, with both kinds of host memory."""

    pool: PagePool
    memory: PeerMemory
    staged: Tensor
    copier: Copier
    host: Tensor

    def write_late(self, pages: list[int]) -> Tensor:
        """Write random numbers to pages after a delay. Return the final content."""
        new = torch.randn(len(pages), *self.pool.group("full_attention").shape[1:]).to(
            self.pool.group("full_attention").dtype
        )
        there, rows = new.to(DEVICE), torch.tensor(pages, device=DEVICE)
        if DEVICE == "cuda":
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        self.pool.group("full_attention")[rows] = there
        return new


def make_region(num_bytes: int) -> Region:
    """Return whole system pages, which pinning requires."""
    endpoint = Endpoint(backend="none", session="none", base_address=0, num_bytes=num_bytes)
    return Region(memoryview(mmap.mmap(-1, num_bytes)), endpoint)


@pytest.fixture(params=["engine", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the way in which pages are copied. Otherwise their size decides it, and test pages are small."""
    if request.param == "engine":
        monkeypatch.setattr(memory_copy, "LEAST_PIECE_BYTES", 0)


@pytest.fixture
def world(way: None) -> Iterator[World]:  # noqa: ARG001 - it is asked while pages are copied
    pool = PagePool(LAYOUT, device=torch.device(DEVICE))
    region, host = make_region(LAYOUT.pool_bytes), make_region(4 * LAYOUT.page_bytes)
    pinned = PinnedMemory([region.buffer, host.buffer] if DEVICE == "cuda" else [])
    memory = PeerMemory(pool, region)
    records = [msgspec.structs.replace(record(Role.PREFILL, 0, 1, LAYOUT.num_pages), layout=LAYOUT)]
    staged, kept = (
        torch.frombuffer(each.buffer, dtype=torch.bfloat16).view(-1, *pool.group("full_attention").shape[1:])
        for each in (region, host)
    )
    yield World(pool, memory, staged, Copier(records, 0, TierMemory(memory, host), Loopback()), kept)
    pinned.close()


def pages_of(pairs: Sequence[tuple[int, int]]) -> list[TierPage]:
    """Return device pages with their host slots."""
    return [TierPage(key=b"", index=0, device=page, host=slot) for page, slot in pairs]


def test_pages_are_sent_after_they_are_written(world: World) -> None:
    expected = world.write_late([5, 1, 3])
    event = world.memory.event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(world.memory.publish, PageRange(LAYOUT, [5, 1, 3], LAYOUT.layers), event).result()
    assert torch.equal(world.staged[[5, 1, 3]], expected)
    assert not world.staged[[0, 2, 4, 6, 7]].any()


def test_layers_are_sent_after_they_are_written(world: World) -> None:
    expected = world.write_late([5, 1])
    event = world.memory.event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(world.memory.publish, PageRange(LAYOUT, [5, 1], range(2, 6)), event).result()
    assert torch.equal(world.staged[[5, 1], :, 2:6], expected[:, :, 2:6])
    assert not world.staged[:, :, :2].any()
    assert not world.staged[:, :, 6:].any()


def test_loaded_pages_are_visible_to_the_next_kernel(world: World) -> None:
    expected = torch.randn(2, *world.pool.group("full_attention").shape[1:]).to(torch.bfloat16)
    world.staged[[6, 2]] = expected
    world.memory.receive([6, 2])
    assert torch.equal(world.pool.group("full_attention")[[6, 2]].cpu(), expected)


def test_tiers_keep_pages_and_bring_them_back(world: World) -> None:
    expected = world.write_late([1, 2, 3])
    event = world.copier.memory.record_event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(world.copier.save, pages_of([(1, 2), (2, 0), (3, 3)]), event).result()
        assert torch.equal(world.host[[2, 0, 3]], expected)
        world.write_late([4, 5, 6])
        thread.submit(
            world.copier.load, pages_of([(4, 2), (5, 0), (6, 3)]), world.copier.memory.record_event()
        ).result()
    assert torch.equal(world.pool.group("full_attention")[4:7].cpu(), expected)


def test_layers_are_read_while_others_load(world: World) -> None:
    world.host.copy_(torch.randn(world.host.shape))
    load, event = LayerwiseLoad(), world.copier.memory.record_event()
    with ThreadPoolExecutor(1) as thread, world.pool.in_step(load):
        loaded = thread.submit(world.copier.load_layerwise, pages_of([(0, 1), (4, 3)]), event, load)
        seen = [torch.stack(world.pool.layer_view(layer), dim=2)[[0, 4]].cpu() for layer in range(LAYOUT.num_layers)]
        loaded.result()
    assert torch.equal(torch.stack(seen, dim=2), world.host[[1, 3]])


@settings(max_examples=50)
@given(st.data())
def test_pages_are_where_they_belong(data: st.DataObject) -> None:
    check_copies(data, torch.device(DEVICE))


def test_tokens_equal_a_cpus() -> None:
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
    sampled = sampler.draw(logits.to(DEVICE), rows, positions)
    assert sampled.tolist() == sampler.draw(logits, rows, positions).tolist()


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_a_token_of_corrupt_logits_is_in_the_vocabulary(vocab_size: int) -> None:
    """The next step may embed it before the host knows."""
    logits = torch.full((2, vocab_size), torch.nan, device=DEVICE)
    sampled = sampler.draw(logits, [Sampling(temperature=1.0, top_p=0.9, seed=1)] * 2, [0, 1])
    assert ((sampled >= 0) & (sampled < vocab_size)).all()
