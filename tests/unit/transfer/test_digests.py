"""Page digests: for any two layouts, they detect each flipped bit that was sent, and nothing else."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.spec.registry import AxisSizes
from cluster.spec.transfer_messages import PageDigests
from tests.fakes.rank_records import LAYOUT, make_record
from tests.unit.transfer.test_unequal_layouts import NUM_PAGES, Pair, pairs
from transfer.page_assignment import PageShare, copies_of, receivers, sent_groups
from transfer.page_range import PageRange, coverage_problem, digest_pages, wrong_pages

POOL = replace(LAYOUT, num_pages=NUM_PAGES)
ONE_RANK = AxisSizes(dp=1, cp=1, tp=1, pp=1)
SIMPLE = Pair(
    [make_record("prefill-0", 0, ONE_RANK, layout=POOL)], [make_record("decode-0", 0, ONE_RANK, layout=POOL)], 0
)
PAGES = [4, 0, 2, 5, 1, 3]
"""Decode's pages for the request."""


def handoff(pair: Pair, seed: int) -> tuple[dict[int, bytearray], list[PageDigests]]:
    """Return each decode rank's pool after all senders have written, and the digests that they reported."""
    rng = random.Random(seed)
    pools = {record.global_rank: bytearray(record.layout.pool_bytes) for record in pair.decode}
    reported = []
    for mine in pair.prefill:
        pool = rng.randbytes(mine.layout.pool_bytes)
        targets = receivers(mine.transfer_mode, mine.coords, mine.sizes, pair.decode)
        for target in targets:
            owned = [
                (pair.page(mine, position), PAGES[position])
                for position in pair.owned(mine)
                if PageShare.of([target]).has(PAGES[position])
            ]
            groups = sent_groups(mine.coords, mine.sizes, target)
            pages = PageRange(mine.layout, [page for page, _ in owned], groups=groups)
            to = PageRange(target.layout, [page for _, page in owned])
            reported.append(digest_pages(memoryview(pool), pages, target.global_rank, to))
            for source, at, length in pages.spans_to(to):
                pools[target.global_rank][at : at + length] = pool[source : source + length]
    return pools, reported


def wrong(pair: Pair, pools: dict[int, bytearray], reported: list[PageDigests]) -> dict[int, list[int]]:
    """Return the pages that each rank finds wrong."""
    found = {}
    for record in pair.decode:
        mine = [part for part in reported if part.rank == record.global_rank]
        if pages := wrong_pages(memoryview(pools[record.global_rank]), record.layout, mine):
            found[record.global_rank] = pages
    return found


@given(pairs(), st.integers(0, 2**32), st.data())
def test_digests_cover_exactly_the_bits_that_were_sent(pair: Pair, seed: int, data: st.DataObject) -> None:
    pools, reported = handoff(pair, seed)
    num_copies = copies_of(pair.decode[0])
    num_bytes = NUM_PAGES * sum(record.layout.page_bytes for record in pair.decode) // num_copies
    num_ranks = max(record.global_rank for record in pair.decode) + 1
    assert coverage_problem(reported, PAGES, num_bytes, num_ranks, num_copies) is None
    assert wrong(pair, pools, reported) == {}
    record = data.draw(st.sampled_from(pair.decode))
    rank, page_bytes = record.global_rank, record.layout.page_bytes
    offset = data.draw(st.integers(0, len(pools[rank]) - 1))
    pools[rank][offset] ^= 1 << data.draw(st.integers(0, 7))
    page = offset // page_bytes
    assert wrong(pair, pools, reported) == (
        {rank: [page]} if page in PAGES and PageShare.of([record]).has(page) else {}
    )


def test_pages_meant_for_another_rank_with_the_same_heads_are_misplaced() -> None:
    sizes = AxisSizes(dp=1, cp=1, tp=2, pp=1)
    pair = Pair(SIMPLE.prefill, [make_record("decode-0", rank, sizes, layout=POOL) for rank in range(2)], 0)
    _, reported = handoff(pair, seed=1)
    num_bytes = NUM_PAGES * pair.decode[0].layout.page_bytes
    assert coverage_problem(reported, PAGES, num_bytes, 2, 2) is None
    swapped = [replace(part, rank=1 - part.rank) for part in reported]
    problem = coverage_problem(swapped, PAGES, num_bytes, 2, 2)
    wrong_pairs = [(rank, page) for rank in (0, 1) for page in range(1 - rank, NUM_PAGES, 2)]
    assert problem == f"pages were sent to the wrong ranks; (rank, page): {wrong_pairs}"


def test_swapped_pages_are_wrong() -> None:
    pair = SIMPLE
    pools, reported = handoff(pair, seed=1)
    size = pair.decode[0].layout.page_bytes
    pages = np.frombuffer(pools[0], np.uint8).reshape(-1, size)
    pages[[0, 3]] = pages[[3, 0]]
    assert wrong(pair, pools, reported) == {0: [0, 3]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda reported: reported[:-1], " bytes are covered"),
        (lambda reported: [*reported, reported[0]], "page 0 of rank 0: byte "),
        (
            lambda reported: [replace(reported[0], spans=[(0, 64), (1, reported[0].spans[0][1] - 64)]), *reported[1:]],
            "page 0 of rank 0: byte 64 is not covered exactly once",
        ),
        (
            lambda reported: [replace(reported[0], spans=[(0, 0), *reported[0].spans]), *reported[1:]],
            "page 0 of rank 0: ",
        ),
        (lambda reported: [replace(reported[0], rank=99), *reported[1:]], "ranks [99] do not exist; allowed: 0 to 0"),
        (
            lambda reported: [replace(reported[0], pages=[99, *reported[0].pages[1:]]), *reported[1:]],
            "pages [99] are not in the ticket",
        ),
        (lambda reported: [replace(reported[0], digests=[]), *reported[1:]], "the number of digests differs"),
    ],
)
def test_digests_that_do_not_cover_every_byte_once_are_refused(
    change: Callable[[list[PageDigests]], list[PageDigests]], reason: str
) -> None:
    pair = SIMPLE
    _, reported = handoff(pair, seed=1)
    num_bytes = NUM_PAGES * pair.decode[0].layout.page_bytes
    problem = coverage_problem(change(reported), PAGES, num_bytes, len(pair.decode))
    assert problem is not None
    assert reason in problem
