"""Handoffs between any two layouts: one copy of the KV is written, each byte once, in a few spans."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.spec.kv import KvGeometry, KvGroup, KvPart, PoolLayout, key_value_group
from cluster.spec.memory import GIB, pool_layout
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import AxisSizes, KvOwnership, RankRecord, TransferMode
from tests.fakes.rank_records import make_record
from transfer.page_assignment import PageShare, copies_of, local_page, owned_pages, receivers, sent_groups
from transfer.page_range import PageRange

PAGE_SIZE, HEAD_DIM, NUM_PAGES = 2, 3, 6


class Pair(NamedTuple):
    """One DP rank of each of two replicas, and the transfer mode between them."""

    prefill: list[RankRecord]
    decode: list[RankRecord]
    base: int
    """Owner of the first page."""

    def owned(self, record: RankRecord) -> range:
        """Return the pages that a prefill rank sends, by position in the request."""
        return owned_pages(
            record.transfer_mode,
            num_pages=NUM_PAGES,
            cp_rank=record.coords.cp,
            cp_size=record.sizes.cp,
            base=self.base,
        )

    def page(self, record: RankRecord, position: int) -> int:
        """Return the local page of a prefill rank for a position in the request."""
        num_owners = record.num_owners
        return local_page(record, position * num_owners + (self.base + position) % num_owners)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8, 16) if tp % kv_heads == 0 or kv_heads % tp == 0]
    num_layers = draw(st.integers(1, 5))
    groups = [key_value_group(range(num_layers), kv_heads, HEAD_DIM, "float32")]
    if draw(st.booleans()):
        groups.append(_extra_group(draw(st.sampled_from([1, kv_heads])), draw(st.sets(st.integers(0, num_layers - 1)))))
    geometry = KvGeometry(
        model="fake",
        num_layers=num_layers,
        groups=tuple(group for group in groups if group.layers),
        page_size=PAGE_SIZE,
    )
    ownership, cp = draw(st.sampled_from(KvOwnership)), draw(st.integers(1, 3))
    is_free = ownership is KvOwnership.REPLICATED
    transfer_mode = draw(st.sampled_from(TransferMode)) if is_free else TransferMode.ALL_RANKS

    def records(replica: str, cp: int, ownership: KvOwnership) -> list[RankRecord]:
        pp = draw(st.integers(1, min(3, geometry.num_layers)))
        dp = draw(st.integers(1, 3))
        sizes_of = AxisSizes(dp=dp, cp=cp, tp=draw(st.sampled_from(sizes)), pp=pp)
        every = [
            make_record(
                replica,
                rank,
                sizes_of,
                layout=_layout(geometry, sizes_of, rank),
                ownership=ownership,
                transfer_mode=transfer_mode,
                geometry=geometry,
            )
            for rank in range(world_size(sizes_of))
        ]
        dp_rank = draw(st.integers(0, dp - 1))
        return [record for record in every if record.coords.dp == dp_rank]

    decode = records("decode-0", 1, KvOwnership.REPLICATED)
    return Pair(records("prefill-0", cp, ownership), decode, draw(st.integers(0, cp - 1)))


def _layout(geometry: KvGeometry, sizes: AxisSizes, rank: int) -> PoolLayout:
    """Return a pool with a few more pages than a request needs."""
    coords = coords_of(rank, sizes)
    page_bytes = pool_layout(geometry, sizes, coords, 1.0).page_bytes
    return pool_layout(geometry, sizes, coords, (NUM_PAGES + 3) * page_bytes / GIB)


def _extra_group(num_heads: int, layers: set[int]) -> KvGroup:
    """Return two parts with different widths in some of the layers."""
    parts = (KvPart(name="latent", dim=3, dtype="float32"), KvPart(name="keys", dim=1, dtype="float32"))
    return KvGroup(name="extra", num_heads=num_heads, layers=tuple(sorted(layers)), parts=parts)


def _elements(record: RankRecord, page: int) -> NDArray[np.int64]:
    """Return the request's elements that one page of a pool should hold, in byte order."""
    held = {group.name: group for group in record.layout.groups}
    found, first = [], page * record.geometry.bytes_per_token // 4 * PAGE_SIZE
    for group in record.geometry.groups:
        whole = (group.num_heads, len(group.layers), PAGE_SIZE * group.slot_bytes // 4)
        numbers = np.arange(first, first + math.prod(whole)).reshape(whole)
        first += math.prod(whole)
        if shard := held.get(group.name):
            heads = slice(shard.first_head, shard.first_head + shard.num_heads)
            found.append(numbers[heads, [group.layers.index(layer) for layer in shard.layers]].ravel())
    return np.concatenate(found)


def _filled(record: RankRecord, pages: dict[int, int]) -> NDArray[np.int32]:
    """Return a pool with the right elements in a request's pages, given as position -> page, and -1 elsewhere."""
    layout = record.layout
    data = np.full((layout.num_pages + 1, layout.page_bytes // 4), -1, dtype=np.int32)
    for position, page in pages.items():
        data[page] = _elements(record, position).ravel()
    return data


def check_handoff(pair: Pair) -> int:
    """Check that every decode rank gets its part, each byte once. Return the number of bytes written."""
    target_pages = {position: NUM_PAGES - position for position in range(NUM_PAGES)}
    pools = {record.global_rank: _filled(record, {}).view(np.uint8).ravel() for record in pair.decode}
    num_written = 0
    for record in pair.prefill:
        held = pair.owned(record) if record.num_owners > 1 else range(NUM_PAGES)
        source = _filled(record, {position: pair.page(record, position) for position in held}).view(np.uint8).ravel()
        targets = receivers(record.transfer_mode, record.coords, record.sizes, pair.decode)
        for target in targets:
            page_pairs = [
                (pair.page(record, position), target_pages[position])
                for position in pair.owned(record)
                if PageShare.of([target]).has(target_pages[position])
            ]
            groups = sent_groups(record.coords, record.sizes, target)
            ours = PageRange(record.layout, [page for page, _ in page_pairs], groups=groups)
            spans = ours.spans_to(PageRange(target.layout, [page for _, page in page_pairs]))
            shared = sum(group.num_heads for group in record.layout.groups if group.name in groups)
            assert len(spans) <= len(page_pairs) * shared, "never more than one span a page and head"
            if record.layout.layers == target.layout.layers:
                assert len(spans) <= len(page_pairs) * len(groups), "heads lie side by side in a page"
            for span in spans:
                into = pools[target.global_rank][span.target_offset : span.target_offset + span.num_bytes]
                into[:] = source[span.source_offset : span.source_offset + span.num_bytes]
                num_written += span.num_bytes
    for record in pair.decode:
        found = pools[record.global_rank]
        sent = {position: page for position, page in target_pages.items() if PageShare.of([record]).has(page)}
        np.testing.assert_array_equal(
            found.view(np.int32).reshape(record.layout.num_pages + 1, -1), _filled(record, sent)
        )
    num_bytes = sum(record.layout.page_bytes for record in pair.decode) // copies_of(pair.decode[0])
    assert num_written == NUM_PAGES * num_bytes, "not one copy of the KV for all ranks with the same heads"
    return num_written


@settings(deadline=None, max_examples=300)
@given(pairs())
def test_every_decode_rank_gets_its_part_once(pair: Pair) -> None:
    check_handoff(pair)


@pytest.mark.full
@settings(deadline=None, max_examples=3000)
@given(pairs())
def test_every_decode_rank_gets_its_part_once_in_thousands_of_layouts(pair: Pair) -> None:
    check_handoff(pair)


@pytest.mark.parametrize("transfer_mode", TransferMode)
@pytest.mark.parametrize("cp", [1, 2])
def test_latents_that_every_rank_holds_are_written_once(transfer_mode: TransferMode, cp: int) -> None:
    """Four TP ranks on both sides hold all latents and index keys."""
    geometry = KvGeometry(model="fake", num_layers=4, groups=(_extra_group(1, {0, 1, 2, 3}),), page_size=PAGE_SIZE)

    def records(replica: str, cp: int) -> list[RankRecord]:
        sizes = AxisSizes(dp=1, cp=cp, tp=4, pp=1)
        return [
            make_record(
                replica,
                rank,
                sizes,
                layout=_layout(geometry, sizes, rank),
                transfer_mode=transfer_mode,
                geometry=geometry,
            )
            for rank in range(world_size(sizes))
        ]

    pair = Pair(records("prefill-0", cp), records("decode-0", 1), base=0)
    latent_and_key_bytes = (3 + 1) * 4
    assert check_handoff(pair) == NUM_PAGES * PAGE_SIZE * 4 * latent_and_key_bytes


@settings(deadline=None, max_examples=200)
@given(pairs())
def test_ranks_with_the_same_heads_are_sent_every_page_between_them(pair: Pair) -> None:
    for record in pair.decode:
        same = [other for other in pair.decode if other.layout == record.layout]
        assert len(same) == copies_of(record), "copies are those that hold the same heads and layers"
        for page in range(record.layout.num_pages):
            assert sum(PageShare.of([other]).has(page) for other in same) == 1


@settings(deadline=None, max_examples=200)
@given(pairs())
def test_copies_of_a_head_share_the_pages(pair: Pair) -> None:
    """Each rank sends to one rank, if both sides hold every head equally often."""
    sizes, targets = pair.prefill[0].sizes, pair.decode[0].sizes
    for record in pair.prefill:
        found = receivers(record.transfer_mode, record.coords, record.sizes, pair.decode)
        if sizes.tp == targets.tp and found:
            assert {target.coords.tp for target in found} == {record.coords.tp}
