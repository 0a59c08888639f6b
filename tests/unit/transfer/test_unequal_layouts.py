"""Handoffs between any two ways to cut a model: one copy of the KV is written, each byte once, in a few spans."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.pool import GIB, pool_layout
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import KvOwnership, PageFilter, RankCoords, RankRow, TransferMode
from tests.fakes.rows import make_row
from transfer.layout import layers
from transfer.plan import PageShare, copies_of, local_page, make_spans, owned_pages, receivers

PAGE_SIZE, HEAD_DIM, NUM_PAGES = 2, 3, 6


class Pair(NamedTuple):
    """One DP rank of each of two replicas, and how one sends to the other."""

    prefill: list[RankRow]
    decode: list[RankRow]
    base: int
    """Owner of the first page."""

    def owned(self, row: RankRow) -> range:
        """The pages that a prefill rank sends, by position in the request."""
        return owned_pages(
            row.page_filter,
            row.transfer_mode,
            num_pages=NUM_PAGES,
            cp_rank=row.coords.cp,
            cp_size=row.sizes.cp,
            base=self.base,
        )

    def page(self, row: RankRow, position: int) -> int:
        """Where a prefill rank holds a page of the request."""
        num_owners = row.num_owners
        return local_page(row, position * num_owners + (self.base + position) % num_owners)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8, 16) if tp % kv_heads == 0 or kv_heads % tp == 0]
    geometry = KvGeometry(
        model="fake",
        num_layers=draw(st.integers(1, 5)),
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        dtype="float32",
        page_size=PAGE_SIZE,
    )
    ownership, cp = draw(st.sampled_from(KvOwnership)), draw(st.integers(1, 3))
    is_free = ownership is KvOwnership.REPLICATED
    transfer_mode = draw(st.sampled_from(TransferMode)) if is_free else TransferMode.ALL_RANKS
    page_filter = draw(st.sampled_from(PageFilter)) if is_free else PageFilter.MODULAR

    def rows(replica: str, cp: int, ownership: KvOwnership) -> list[RankRow]:
        pp = draw(st.integers(1, min(3, geometry.num_layers)))
        dp = draw(st.integers(1, 3))
        sizes_of = RankCoords(dp=dp, cp=cp, tp=draw(st.sampled_from(sizes)), pp=pp)
        every = [
            make_row(
                replica,
                rank,
                sizes_of,
                layout=_layout(geometry, sizes_of, rank),
                ownership=ownership,
                transfer_mode=transfer_mode,
                page_filter=page_filter,
                geometry=geometry,
            )
            for rank in range(world_size(sizes_of))
        ]
        dp_rank = draw(st.integers(0, dp - 1))
        return [row for row in every if row.coords.dp == dp_rank]

    decode = rows("decode-0", 1, KvOwnership.REPLICATED)
    return Pair(rows("prefill-0", cp, ownership), decode, draw(st.integers(0, cp - 1)))


def _layout(geometry: KvGeometry, sizes: RankCoords, rank: int) -> PoolLayout:
    """A pool of some pages more than a request has."""
    coords = coords_of(rank, sizes)
    page_bytes = pool_layout(geometry, sizes, coords, 1.0).page_bytes
    return pool_layout(geometry, sizes, coords, (NUM_PAGES + 3) * page_bytes / GIB)


def _elements(row: RankRow, page: int) -> NDArray[np.int64]:
    """Which elements of the request one page of one pool should hold: [head, layer, k_or_v, slot, dim]."""
    layout, geometry = row.layout, row.geometry
    whole = (geometry.num_kv_heads, geometry.num_layers, 2, PAGE_SIZE, HEAD_DIM)
    first = page * int(np.prod(whole))
    heads = slice(layout.first_head, layout.first_head + layout.num_heads)
    stage = slice(layout.first_layer, layout.first_layer + layout.num_layers)
    numbers: NDArray[np.int64] = np.arange(first, first + int(np.prod(whole))).reshape(whole)[heads, stage]
    return numbers


def _filled(row: RankRow, pages: dict[int, int]) -> NDArray[np.int32]:
    """A pool with the right elements in the pages of a request, given as position -> page, and -1 elsewhere."""
    layout = row.layout
    data = np.full((layout.num_pages + 1, layout.page_bytes // 4), -1, dtype=np.int32)
    for position, page in pages.items():
        data[page] = _elements(row, position).ravel()
    return data


def check_handoff(pair: Pair) -> None:
    """Every decode rank gets its part, and nothing twice."""
    places = {position: NUM_PAGES - position for position in range(NUM_PAGES)}
    pools = {row.global_rank: _filled(row, {}).view(np.uint8).ravel() for row in pair.decode}
    num_written = 0
    for row in pair.prefill:
        held = pair.owned(row) if row.num_owners > 1 else range(NUM_PAGES)
        source = _filled(row, {position: pair.page(row, position) for position in held}).view(np.uint8).ravel()
        targets = receivers(row.transfer_mode, row.coords, row.sizes, pair.decode)
        for target in targets:
            page_pairs = [
                (pair.page(row, position), places[position])
                for position in pair.owned(row)
                if PageShare.of([target]).has(places[position])
            ]
            spans = make_spans(row.layout, target.layout, page_pairs)
            shared = min(row.layout.num_heads, target.layout.num_heads)
            assert len(spans) <= len(page_pairs) * shared, "never more than one span a page and head"
            if layers(row.layout) == layers(target.layout):
                assert len(spans) <= len(page_pairs), "heads lie side by side in a page"
            for span in spans:
                into = pools[target.global_rank][span.target_offset : span.target_offset + span.num_bytes]
                into[:] = source[span.source_offset : span.source_offset + span.num_bytes]
                num_written += span.num_bytes
    for row in pair.decode:
        found = pools[row.global_rank]
        sent = {position: page for position, page in places.items() if PageShare.of([row]).has(page)}
        np.testing.assert_array_equal(found.view(np.int32).reshape(row.layout.num_pages + 1, -1), _filled(row, sent))
    assert num_written == NUM_PAGES * pair.decode[0].geometry.bytes_per_token * PAGE_SIZE, "not one copy of the KV"


@settings(deadline=None, max_examples=1500)
@given(pairs())
def test_every_decode_rank_gets_its_part_once(pair: Pair) -> None:
    check_handoff(pair)


@pytest.mark.full
@settings(deadline=None, max_examples=3000)
@given(pairs())
def test_every_decode_rank_gets_its_part_once_in_thousands_of_layouts(pair: Pair) -> None:
    check_handoff(pair)


@settings(deadline=None, max_examples=200)
@given(pairs())
def test_ranks_with_the_same_heads_are_sent_every_page_between_them(pair: Pair) -> None:
    for row in pair.decode:
        same = [other for other in pair.decode if other.layout == row.layout]
        assert len(same) == copies_of(row), "copies are those that hold the same heads and layers"
        for page in range(row.layout.num_pages):
            assert sum(PageShare.of([other]).has(page) for other in same) == 1


@settings(deadline=None, max_examples=200)
@given(pairs())
def test_copies_of_a_head_take_turns(pair: Pair) -> None:
    """Where both sides hold every head equally often, each rank sends to one rank."""
    sizes, targets = pair.prefill[0].sizes, pair.decode[0].sizes
    for row in pair.prefill:
        found = receivers(row.transfer_mode, row.coords, row.sizes, pair.decode)
        if sizes.tp == targets.tp and found:
            assert {target.coords.tp for target in found} == {row.coords.tp}
