"""Copies of pages by a kernel, and when it is one that copies."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.spec.kv import PoolLayout
from tests.fakes.kernels_on_cpu import kernels_on_cpu
from tests.fakes.loopback import Loopback
from tests.fakes.page_copies import check_copies
from workers.cache import page_copies
from workers.cache.layer_arrivals import LayerArrivals
from workers.cache.page_copies import PageCopies, warm_up_copies
from workers.cache.page_pool import PagePool
from workers.cache.staging import Staging
from workers.hicache.device_pages import MOST_GROUPS, StagedPages
from workers.kernels import copy_pages as kernel

LAYOUT = PoolLayout(
    num_pages=4,
    first_head=0,
    num_heads=2,
    first_layer=0,
    num_layers=2 * MOST_GROUPS,
    page_size=4,
    head_dim=8,
    itemsize=2,
)
_Counted = list[int]
"""Pages of each launch."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    """Of kernels, which are interpreted."""
    counted: _Counted = []
    copy_pages: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = kernel.copy_pages

    def count(source: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
        counted.append(places.shape[1])
        copy_pages(source, target, places)

    kernels_on_cpu(monkeypatch)
    monkeypatch.setattr(kernel, "copy_pages", count)
    return counted


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pages_are_where_they_belong(data: st.DataObject, launches: _Counted) -> None:
    launches.clear()
    check_copies(data, torch.device("cpu"))
    assert len(launches) in (0, 3)


@pytest.mark.parametrize(("least", "by_a_kernel"), [(0, False), (255, False), (256, False), (257, True)])
def test_large_pieces_are_left_to_the_copy_engine(
    least: int, launches: _Counted, monkeypatch: pytest.MonkeyPatch, *, by_a_kernel: bool
) -> None:
    """Whole pages of four heads; some layers of them are pieces a head."""
    monkeypatch.setattr(page_copies, "LEAST_PIECE_BYTES", least)
    source = torch.randint(256, (3, 4, 2, 32), dtype=torch.uint8)
    copies = PageCopies(source, [2, 0], torch.zeros_like(source), [0, 1])
    copies.start()
    assert launches == ([2] if by_a_kernel else [])
    assert torch.equal(copies.target[:2], source[[2, 0]])
    copies.layers(slice(0, 1)).start()
    assert len(launches) == by_a_kernel + (least > 32)


def test_layers_of_all_pages_and_heads_come_by_one_launch_a_group(launches: _Counted) -> None:
    loopback = Loopback()
    sizes = (LAYOUT.num_pages, LAYOUT.num_heads, LAYOUT.num_layers, LAYOUT.page_size, LAYOUT.head_dim)
    pool = PagePool(*sizes, torch.bfloat16)
    region, host = loopback.allocate(LAYOUT.pool_bytes), loopback.allocate(4 * LAYOUT.page_bytes)
    kept = torch.frombuffer(host.buffer, dtype=torch.bfloat16).view(4, *pool.data.shape[1:])
    kept.copy_(torch.randn(kept.shape))
    pages = StagedPages(pool, Staging(pool, region.buffer), region, host, LAYOUT)
    pages.load_layerwise([(1, 3), (2, 0), (0, 1)], [], lambda _: None, pages.record_event(), LayerArrivals())
    assert launches == [3] * MOST_GROUPS
    assert torch.equal(pool.data[[1, 2, 0]], kept[[3, 0, 1]])
    assert not pool.data[3:].any()


def test_what_copies_is_there_before_the_first_request(launches: _Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(*(3, 2, 1, 4, 8), torch.bfloat16)
    before = pool.data.normal_().clone()
    warm_up_copies(pool.data)
    assert launches == [1]
    assert torch.equal(pool.data, before)
    kernels_on_cpu(monkeypatch, on=False)
    warm_up_copies(pool.data)
    assert launches == [1]
