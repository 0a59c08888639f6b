"""Tiles: every (query, key) pair that is to be seen is in exactly one, whatever is split."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.attention.triton.tiling import LEAST_KEYS, PROGRAMS, Item, Segment, Tiling, cut, split_len


@st.composite
def items(draw: st.DrawFn) -> list[Item]:
    made, row = [], 0
    for _ in range(draw(st.integers(0, 4))):
        num_queries = draw(st.integers(1, 40))
        segments = []
        for _ in range(draw(st.integers(0, 3))):
            num_keys = draw(st.integers(1, 60))
            segments.append(Segment(0, 0, 0, num_keys, draw(st.integers(-5, 60)), draw(st.integers(0, 3))))
        made.append(Item(row, num_queries, tuple(segments)))
        row += num_queries
    return made


def seen(num_queries: int, first_index: int, segment: Segment) -> list[tuple[int, int]]:
    return [
        (query, key)
        for query in range(num_queries)
        for key in range(segment.begin, segment.stop)
        if key <= segment.ahead + (first_index + query) * segment.step
    ]


def pairs_of_tiles(tiling: Tiling) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    for first_row, num_queries, first_index, first_segment, num_segments, _, _ in tiling.tiles.tolist():
        for numbers in tiling.segments[first_segment : first_segment + num_segments].tolist():
            for query, key in seen(num_queries, first_index, Segment(*numbers)):
                pairs[first_row + query, key] += 1
    return pairs


@given(items(), st.integers(1, 16), st.sampled_from([None, 16, 32]))
def test_every_pair_is_in_one_tile(made: list[Item], queries: int, keys_a_split: int | None) -> None:
    expected: Counter[tuple[int, int]] = Counter()
    for item in made:
        for segment in item.segments:
            expected.update((item.first_row + query, key) for query, key in seen(item.num_queries, 0, segment))
    assert pairs_of_tiles(cut(made, queries, keys_a_split)) == expected


@given(items(), st.integers(1, 16), st.sampled_from([None, 16, 32]))
def test_every_place_of_every_row_is_written_once(made: list[Item], queries: int, keys_a_split: int | None) -> None:
    tiling = cut(made, queries, keys_a_split)
    written = Counter(
        (target + query, place)
        for _, num_queries, _, _, _, target, place in tiling.tiles.tolist()
        for query in range(num_queries)
    )
    rows = [item.first_row + query for item in made for query in range(item.num_queries)]
    assert tiling.rows.tolist() == rows
    assert tiling.num_places == max(tiling.counts.tolist(), default=1)
    targets = range(len(rows)) if tiling.num_places > 1 else rows
    assert written == Counter(
        (target, place) for target, count in zip(targets, tiling.counts, strict=True) for place in range(count)
    )


def test_most_work_comes_first() -> None:
    made = [Item(0, 100, (Segment(0, 0, 0, 500, 400, 1),)), Item(100, 1, (Segment(0, 0, 0, 900, 899, 0),))]
    tiles = cut(made, 10, None).tiles
    assert tiles[0, 0] == 100
    assert np.all(np.diff(tiles[1:, 2]) < 0)


def test_only_few_tiles_with_many_keys_are_split() -> None:
    long = [Item(0, 1, (Segment(0, 0, 0, 100_000, 99_999, 0),))]
    keys = split_len(long, 1, 8, 64)
    assert keys is not None
    assert keys % 64 == 0
    assert PROGRAMS / 2 < 8 * (100_000 / keys) <= PROGRAMS
    assert split_len(long * 40, 1, 8, 64) is None
    assert split_len([Item(0, 1, (Segment(0, 0, 0, 2 * LEAST_KEYS - 1, 0, 0),))], 1, 8, 64) is None
    assert split_len([], 1, 8, 64) is None
