"""Page copies by a kernel, and the condition for using it."""

from collections.abc import Callable
from itertools import count

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.spec.ids import Role
from cluster.spec.kv import lifetime_key
from cluster.spec.tiers import TierPage
from tests.fakes.devices import kernels_on_cpu
from tests.fakes.gpu_twin import META, twin_gpu
from tests.fakes.kv import kv_geometry, kv_layout, kv_pool
from tests.fakes.loopback import Loopback
from tests.fakes.page_copies import check_copies, layout_of
from tests.fakes.paged_ranks import record
from tests.unit.workers.test_window_tiers import windowed
from transfer.page_range import PageRange
from workers.hicache.copier import MOST_LAYER_GROUPS, Copier
from workers.kernels import copy_pages as kernel
from workers.memory import copy as memory_copy
from workers.memory.copy import PageMemory, PinnedMemory, copy, warm_up_copies
from workers.memory.layerwise_load import LayerwiseLoad
from workers.memory.page_pool import PagePool
from workers.memory.peer_memory import PeerMemory, TierMemory

LAYOUT = kv_layout(
    num_pages=4,
    first_head=0,
    num_heads=2,
    first_layer=0,
    num_layers=2 * MOST_LAYER_GROUPS,
    page_size=4,
    head_dim=8,
    itemsize=2,
)
_Counted = list[int]
"""Number of pages in each launch."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    """Return the recorded kernel launches, which are interpreted."""
    counted: _Counted = []
    copy_pages: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = kernel.copy_pages

    def count(source: torch.Tensor, target: torch.Tensor, indices: torch.Tensor) -> None:
        counted.append(indices.shape[1])
        copy_pages(source, target, indices)

    kernels_on_cpu(monkeypatch)
    monkeypatch.setattr(kernel, "copy_pages", count)
    return counted


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pages_are_where_they_belong(data: st.DataObject, launches: _Counted) -> None:
    launches.clear()
    check_copies(data, torch.device("cpu"))
    assert len(launches) % 3 == 0


@pytest.mark.parametrize(("least", "by_a_kernel"), [(0, False), (255, False), (256, False), (257, True)])
def test_large_pieces_are_left_to_the_copy_engine(
    least: int, launches: _Counted, monkeypatch: pytest.MonkeyPatch, *, by_a_kernel: bool
) -> None:
    """Pages of four heads are copied as a whole. If only some layers are copied, each head is a piece."""
    monkeypatch.setattr(memory_copy, "LEAST_PIECE_BYTES", least)
    layout = layout_of(kv_geometry(num_layers=2, num_kv_heads=4), 2)
    source = PageMemory(torch.randint(256, (layout.pool_bytes,), dtype=torch.uint8), layout)
    target = PageMemory(torch.zeros(layout.pool_bytes, dtype=torch.uint8), layout)
    copy(source.at([2, 0]), target.at([0, 1]))
    assert launches == ([2] if by_a_kernel else [])
    assert torch.equal(target.bytes[:2], source.bytes[[2, 0]])
    copy(source.at([2, 0], range(1)), target.at([0, 1], range(1)))
    assert len(launches) == by_a_kernel + (least > 32)


def test_layers_of_all_pages_and_heads_take_one_launch_per_group(launches: _Counted) -> None:
    loopback = Loopback()
    pool = PagePool(LAYOUT)
    region, host = loopback.allocate(LAYOUT.pool_bytes), loopback.allocate(4 * LAYOUT.page_bytes)
    kept = torch.frombuffer(host.buffer, dtype=torch.uint8).view(4, -1)
    kept.copy_(torch.randint(1, 256, kept.shape))
    records = [msgspec.structs.replace(record(Role.PREFILL, 0, 1, 4), layout=LAYOUT)]
    copier = Copier(records, 0, TierMemory(PeerMemory(pool, region), host), loopback)
    pages = [TierPage(key=b"", index=0, device=page, host=slot) for page, slot in [(1, 3), (2, 0), (0, 1)]]
    copier.load_layerwise(pages, copier.memory.record_event(), LayerwiseLoad())
    assert launches == [3] * MOST_LAYER_GROUPS
    assert torch.equal(pool.bytes[[1, 2, 0]], kept[[3, 0, 1]])
    assert not pool.bytes[3:].any()


def test_copy_kernels_are_compiled_before_the_first_request(launches: _Counted) -> None:
    pool = kv_pool(*(3, 2, 1, 4, 8), torch.bfloat16)
    before = pool.group("full_attention").normal_().clone()
    warm_up_copies(pool)
    assert launches == [1]
    assert torch.equal(pool.group("full_attention"), before)


@pytest.mark.parametrize("least", [0, memory_copy.LEAST_PIECE_BYTES])
def test_copies_follow_earlier_work(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages may still be written to when a request frees them."""
    monkeypatch.setattr(memory_copy, "LEAST_PIECE_BYTES", least)
    loopback = Loopback()
    with twin_gpu() as gpu:
        region, host = loopback.allocate(LAYOUT.pool_bytes), loopback.allocate(4 * LAYOUT.page_bytes)
        pinned = PinnedMemory([region.buffer, host.buffer])
        memory = PeerMemory(PagePool(LAYOUT, device=META), region)
        tiers = TierMemory(memory, host)
        memory.pool.bytes[1].fill_(1)
        memory.publish(PageRange(LAYOUT, [1]), memory.event())
        assert set(region.buffer[LAYOUT.page_bytes : 2 * LAYOUT.page_bytes]) == {1}
        memory.pool.bytes[1].fill_(2)
        tiers.save([1], [3], memory.event())
        assert set(tiers.host_page(3)) == {2}
        memory.pool.bytes[2].fill_(3)
        tiers.load([2], [3], 0, None, memory.event())
        tiers.wait_loads()
        gpu.synchronize()
        assert (memory.pool.bytes[2] == 2).all()
        pinned.close()


def test_a_failed_load_writes_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages may already belong to another request."""
    layout, loopback, num_copies = layout_of(windowed(), 4), Loopback(), count()
    with twin_gpu() as gpu:
        put = gpu.put

        def put_once(on_host: torch.Tensor) -> torch.Tensor:
            if next(num_copies):
                raise torch.OutOfMemoryError
            return put(on_host)

        pool = PagePool(layout, device=META)
        region, host = loopback.allocate(layout.pool_bytes), loopback.allocate(2 * layout.page_bytes)
        pinned = PinnedMemory([region.buffer, host.buffer])
        records = [msgspec.structs.replace(record(Role.PREFILL, 0, 1, 4), layout=layout)]
        copier = Copier(records, 0, TierMemory(PeerMemory(pool, region), host), loopback)
        monkeypatch.setattr(gpu, "put", put_once)
        pages = [TierPage(key=lifetime_key(b"k" * 16, at), index=at, device=at, host=at) for at in range(2)]
        with pytest.raises(torch.OutOfMemoryError):
            copier.load(pages, copier.memory.record_event())
        pool.bytes[0].fill_(1)
        gpu.synchronize()
        assert (pool.bytes[0] == 1).all()
        pinned.close()
