"""Page filters are disjoint and complete. Spans copy the same bytes as an element-by-element copy."""

import itertools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.spec.kv import PoolLayout
from cluster.spec.registry import KvOwnership, TransferMode
from tests.fakes.kv import kv_layout, make_spans
from tests.fakes.pages import allocate
from tests.fakes.rank_records import make_record, sizes
from tests.unit.transfer.samples import pool
from transfer.page_assignment import (
    LEAST_SPAN_BYTES,
    MOST_GROUPS,
    PagePair,
    early_ends,
    local_page,
    owned_pages,
)
from transfer.page_range import PageRange, Span, batches, total_bytes
from workers.cache.page_allocator import PageAllocator

ALL = TransferMode.ALL_RANKS


@given(
    st.sampled_from(TransferMode),
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(0, 20),
    st.integers(0, 70),
)
def test_ranks_share_the_pages_of_a_request(mode: TransferMode, num_pages: int, cp: int, base: int, first: int) -> None:
    parts = [
        owned_pages(mode, num_pages=num_pages, cp_rank=rank, cp_size=cp, base=base, first=first) for rank in range(cp)
    ]
    assert sorted(page for part in parts for page in part) == list(range(first, num_pages))
    assert all(list(part) == sorted(part) for part in parts)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 8), st.integers(0, 30))
def test_an_owner_does_not_depend_on_length_or_start(total: int, cp: int, base: int, first: int) -> None:
    for rank in range(cp):
        pages = owned_pages(ALL, num_pages=total, cp_rank=rank, cp_size=cp, base=base, first=first)
        assert list(pages) == [page for page in range(first, total) if (base + page) % cp == rank]


@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 8), st.integers(0, 30))
def test_each_rank_of_a_ring_sends_the_pages_it_holds(total: int, cp: int, base: int, held: int) -> None:
    """Test through the allocator: page ids, local pages, and the counts that ranks report to decode."""
    allocator = PageAllocator(200, num_owners=cp)
    table = allocate(allocator, total, first_owner=base)
    sent: list[int] = []
    for rank in range(cp):
        record = make_record("prefill-0", rank, sizes(cp=cp), ownership=KvOwnership.SHARDED)
        positions = owned_pages(ALL, num_pages=total, cp_rank=rank, cp_size=cp, base=base, first=min(held, total))
        local = [local_page(record, table[position]) for position in positions]
        assert len(set(local)) == len(local)
        assert all(0 <= page < 200 for page in local)
        sent += positions
    assert sorted(sent) == list(range(min(held, total), total))


def test_a_rank_of_a_ring_cannot_find_the_page_of_another() -> None:
    record = make_record("prefill-0", 1, sizes(cp=3), ownership=KvOwnership.SHARDED)
    assert local_page(record, 7) == 2
    with pytest.raises(AssertionError, match="page 6 is not one of cp_rank 1"):
        local_page(record, 6)


def test_rank0_sends_everything_and_the_others_are_dummies() -> None:
    parts = [
        owned_pages(TransferMode.RANK0, num_pages=5, cp_rank=rank, cp_size=3, base=2, first=1) for rank in range(3)
    ]
    assert [list(part) for part in parts] == [[1, 2, 3, 4], [], []]


def _index(layout: PoolLayout) -> np.ndarray:
    """Return the byte offset of each element [page, head, layer, kv, slot, dim] in the pool."""
    (group,) = layout.groups
    shape = (layout.num_pages + 1, group.num_heads, layout.num_layers, 2, layout.page_size, group.parts[0].dim)
    return np.arange(layout.pool_bytes).reshape(shape)


@st.composite
def _ranges(draw: st.DrawFn, most: int) -> range:
    start = draw(st.integers(0, most - 1))
    return range(start, draw(st.integers(start + 1, most)))


@given(st.data(), _ranges(4), _ranges(4), _ranges(5), _ranges(5))
@settings(max_examples=150)
def test_spans_equal_an_element_for_element_copy(
    data: st.DataObject, heads_a: range, heads_b: range, layers_a: range, layers_b: range
) -> None:
    source, target = pool(6, heads_a, layers_a), pool(7, heads_b, layers_b)
    count = data.draw(st.integers(0, 6))
    from_ids = data.draw(st.permutations(range(6)))[:count]
    to_ids = data.draw(st.permutations(range(7)))[:count]
    first_layer, last_layer = data.draw(st.sampled_from([(0, None), (1, 3), (2, None), (4, 4)]))
    taken = set(range(5)[first_layer:last_layer])

    expected = np.full(target.pool_bytes, -1)
    into, out_of = _index(target), _index(source)
    for source_page, target_page in zip(from_ids, to_ids, strict=True):
        for head in set(heads_a) & set(heads_b):
            for layer in set(layers_a) & set(layers_b) & taken:
                expected[into[target_page, head - heads_b.start, layer - layers_b.start]] = out_of[
                    source_page, head - heads_a.start, layer - layers_a.start
                ]

    pairs = list(map(PagePair, itertools.repeat(0), from_ids, to_ids))
    spans = make_spans(source, target, pairs, first_layer=first_layer, last_layer=last_layer)
    copied = np.full(target.pool_bytes, -1)
    for span in spans:
        assert (copied[span.target_offset : span.target_offset + span.num_bytes] == -1).all(), "written twice"
        copied[span.target_offset : span.target_offset + span.num_bytes] = np.arange(
            span.source_offset, span.source_offset + span.num_bytes
        )
    np.testing.assert_array_equal(copied, expected)
    assert total_bytes(spans) == (expected >= 0).sum()
    for a, b in itertools.pairwise(spans):
        assert (a.source_offset + a.num_bytes, a.target_offset + a.num_bytes) != b[:2], "neighbours not joined"


def test_equal_layouts_give_one_span_per_run_of_pages() -> None:
    whole = pool(9, range(4), range(5))
    size = whole.page_bytes
    assert make_spans(whole, whole, [PagePair(0, 0, 3), PagePair(0, 1, 4), PagePair(0, 2, 6)]) == [
        Span(0, 3 * size, 2 * size),
        Span(2 * size, 6 * size, size),
    ]


def test_unequal_layers_give_one_span_per_head() -> None:
    spans = make_spans(pool(2, range(4), range(5)), pool(2, range(4), range(2, 4)), [PagePair(0, 1, 0)])
    assert [span.num_bytes for span in spans] == [2 * 12] * 4


def test_views_have_the_bytes_of_the_tensor() -> None:
    part = pool(5, range(1, 3), range(2, 5))
    memory: Any = np.arange(part.pool_bytes).reshape(6, -1)
    (some,) = PageRange(part, [], range(3, 5)).views(memory)
    np.testing.assert_array_equal(some, _index(part)[:, :, 1:3].reshape(6, 2, 2, -1))
    (whole,) = PageRange(part, []).views(memory)
    assert whole.shape == (6, 1, 1, part.page_bytes)


@given(st.integers(0, 30), st.integers(1, 9))
def test_batches_keep_order_and_size(count: int, most: int) -> None:
    spans = [Span(i, i, 1) for i in range(count)]
    parts = list(batches(spans, most))
    assert [span for part in parts for span in part] == spans
    assert all(0 < len(part) <= most for part in parts)
    assert len(parts) == -(-count // most)


def layout_of(num_layers: int, head_dim: int) -> PoolLayout:
    return kv_layout(
        num_pages=1,
        first_head=0,
        num_heads=1,
        first_layer=3,
        num_layers=num_layers,
        page_size=64,
        head_dim=head_dim,
        itemsize=2,
    )


@given(st.integers(1, 100), st.sampled_from([8, 64, 96, 128, 256, 1024]))
def test_groups_are_few_and_none_is_small(num_layers: int, head_dim: int) -> None:
    layout = layout_of(num_layers, head_dim)
    borders = [0, *early_ends(layout), num_layers]
    sizes = [end - start for start, end in pairwise(borders)]
    assert len(sizes) <= MOST_GROUPS
    assert len(sizes) == 1 or min(sizes) * layout.groups[0].layer_bytes >= LEAST_SPAN_BYTES
    least = -(-LEAST_SPAN_BYTES // layout.groups[0].layer_bytes)
    assert len(sizes) > 1 or num_layers < 2 * least, "there would be two groups"


def test_a_model_of_usual_size_is_sent_in_quarters() -> None:
    assert early_ends(layout_of(36, 128)) == [9, 18, 27]
