"""The pool's memory layout: a write lands where a view of the layer reads it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.kv import kv_layout, kv_pool, side_by_side, two_groups
from tests.fakes.page_copies import layout_of
from workers.memory.page_pool import PagePool

PAGES, HEADS, LAYERS, PAGE_SIZE, DIM = 5, 3, 2, 4, 8


def make_pool(dtype: torch.dtype = torch.float32, buffer: torch.Tensor | None = None) -> PagePool:
    return kv_pool(PAGES, HEADS, LAYERS, PAGE_SIZE, DIM, dtype, buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_and_a_head_of_it_are_contiguous_spans_as_the_layout_says(dtype: torch.dtype) -> None:
    layout = kv_layout(
        num_pages=PAGES,
        first_head=0,
        num_heads=HEADS,
        first_layer=0,
        num_layers=LAYERS,
        page_size=PAGE_SIZE,
        head_dim=DIM,
        itemsize=dtype.itemsize,
    )
    buffer = torch.zeros(layout.pool_bytes, dtype=torch.uint8)
    pool = make_pool(dtype, buffer)
    assert pool.page_bytes == layout.page_bytes
    assert len(buffer) == layout.pool_bytes
    pool.group("full_attention")[3, 1, 1] = 1.0
    touched = buffer.nonzero().flatten()
    first = 3 * layout.page_bytes + layout.groups[0].head_bytes + layout.groups[0].layer_bytes
    assert first <= int(touched.min())
    assert int(touched.max()) == first + layout.groups[0].layer_bytes - 1


def test_the_pool_lives_in_the_buffer_it_is_given() -> None:
    memory = bytearray(make_pool().page_bytes * (PAGES + 1) + 64)
    pool = make_pool(buffer=torch.frombuffer(memory, dtype=torch.uint8))
    pool.write(0, torch.tensor([0]), torch.ones(1, HEADS, 2 * DIM))
    assert memory[:4] == torch.ones(1).numpy().tobytes()


@settings(deadline=None)
@given(
    st.lists(st.integers(0, PAGES * PAGE_SIZE - 1), unique=True),
    st.integers(0, LAYERS - 1),
    st.sampled_from([1, 2, 6, DIM]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_writes_are_read_and_change_nothing_else(slots: list[int], layer: int, dim: int, dtype: torch.dtype) -> None:
    pool = kv_pool(PAGES, HEADS, LAYERS, PAGE_SIZE, dim, dtype)
    kv = torch.randn(len(slots), 2, HEADS, dim).to(dtype)
    pool.write(layer, torch.tensor(slots, dtype=torch.int64), side_by_side(kv))
    keys, values = pool.layer_view(layer)
    for row, slot in enumerate(slots):
        page, offset = divmod(slot, PAGE_SIZE)
        assert torch.equal(keys[page, :, offset], kv[row, 0])
        assert torch.equal(values[page, :, offset], kv[row, 1])
    assert int(pool.group("full_attention").count_nonzero()) == kv.numel()


def test_padding_rows_may_share_the_null_slot_and_touch_no_page() -> None:
    pool = make_pool()
    pool.write(0, torch.full((7,), pool.null_slot), torch.ones(7, HEADS, 2 * DIM))
    assert not pool.group("full_attention")[:PAGES].any()
    assert pool.group("full_attention")[PAGES].any()


def test_views_share_memory_and_have_one_stride_for_pages_and_heads() -> None:
    pool = make_pool()
    keys, values = pool.layer_view(1)
    assert keys.shape == values.shape == (PAGES + 1, HEADS, PAGE_SIZE, DIM)
    assert keys.stride(0) == HEADS * keys.stride(1)
    keys[2, 0, 0] = 5.0
    assert torch.equal(pool.group("full_attention")[2, 0, 1, 0, 0], torch.full((DIM,), 5.0))


@pytest.mark.parametrize(
    "buffer", [torch.zeros(10, dtype=torch.uint8), torch.zeros(10_000), torch.zeros(2, 9_000, dtype=torch.uint8)]
)
def test_a_buffer_that_does_not_fit_is_our_own_bug(buffer: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        make_pool(buffer=buffer)


def test_groups_with_unequal_parts_are_adjacent_in_a_page() -> None:
    pool = PagePool(layout_of(two_groups(num_layers=4, num_heads=HEADS), PAGES))
    assert pool.group("full_attention").shape == (PAGES + 1, HEADS, 4, 2, 4, 4)
    assert pool.group("extra").shape == (PAGES + 1, 1, 2, 4 * (6 * 2 + 2 * 4))
    slots, kv = torch.tensor([3, 9]), torch.randn(2, 2, HEADS, 4)
    for layer in range(4):
        pool.write(layer, slots, side_by_side(kv + layer))
    pool.group("extra").fill_(7)
    for layer in range(4):
        keys, values = pool.layer_view(layer)
        for row, slot in enumerate((3, 9)):
            assert torch.equal(
                torch.stack((keys[slot // 4, :, slot % 4], values[slot // 4, :, slot % 4])), kv[row] + layer
            )
    assert int((pool.bytes[PAGES] != 0).sum()) == pool.group("extra")[PAGES].numel()
