"""Tiles: every visible (query, key) pair is in exactly one, for any splits."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.attention.triton.tiling import LEAST_KEYS, Item, Segment, Tiling, fair_share, make_tiles, split

PROGRAMS = 33


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
    for first_row, num_queries, first_index, first_segment, num_segments, *_ in tiling.tiles.tolist():
        for numbers in tiling.segments[first_segment : first_segment + num_segments].tolist():
            for query, key in seen(num_queries, first_index, Segment(*numbers)):
                pairs[first_row + query, key] += 1
    return pairs


def in_parts(made: list[Item], keys: int | None) -> list[Item]:
    """Return every segment in parts of up to ``keys`` keys."""
    if keys is None:
        return made
    parts = [
        [
            segment._replace(begin=start, stop=min(start + keys, segment.stop))
            for segment in item.segments
            for start in range(segment.begin, segment.stop, keys)
        ]
        for item in made
    ]
    return [replace(item, segments=tuple(of_item)) for item, of_item in zip(made, parts, strict=True)]


@given(items(), st.integers(1, 16), st.sampled_from([None, 16, 32]))
def test_every_pair_is_in_one_tile(made: list[Item], queries: int, keys: int | None) -> None:
    expected: Counter[tuple[int, int]] = Counter()
    for item in made:
        for segment in item.segments:
            expected.update((item.first_row + query, key) for query, key in seen(item.num_queries, 0, segment))
    assert pairs_of_tiles(make_tiles(in_parts(made, keys), queries, in_parts=keys is not None)) == expected


@given(items(), st.integers(1, 16), st.sampled_from([None, 16, 32]))
def test_every_part_of_every_row_is_written_once_and_read(made: list[Item], queries: int, keys: int | None) -> None:
    tiling = make_tiles(in_parts(made, keys), queries, in_parts=keys is not None)
    if keys is None:
        assert tiling.num_slots == 0
        assert tiling.tiles[:, 5:7].tolist() == [[0, 1]] * len(tiling.tiles)
    slots: Counter[int] = Counter()
    parts: dict[int, list[tuple[int, ...]]] = {}
    for first_row, num_queries, _, _, _, part, num_parts, first_slot, slot_step in tiling.tiles.tolist():
        for query in range(num_queries):
            slots[first_slot + part * slot_step + query] += num_parts > 1
            parts.setdefault(first_row + query, []).append((part, num_parts, first_slot + query, slot_step))
    assert sorted(parts) == [item.first_row + query for item in made for query in range(item.num_queries)]
    for of_row in parts.values():
        _, *others = sorted(of_row)[0]
        assert sorted(of_row) == [(part, *others) for part in range(others[0])]
    assert +slots == Counter(range(tiling.num_slots))


def test_most_work_comes_first() -> None:
    made = [Item(0, 100, (Segment(0, 0, 0, 500, 400, 1),)), Item(100, 1, (Segment(0, 0, 0, 900, 899, 0),))]
    tiles = make_tiles(made, 10).tiles
    assert tiles[0, 0] == 100
    assert np.all(np.diff(tiles[1:, 2]) < 0)


def token(row: int, num_keys: int) -> Item:
    """Return a decoded token."""
    return Item(row, 1, (Segment(0, 0, 0, num_keys, num_keys - 1, 0),))


def test_only_few_tiles_with_many_keys_are_split() -> None:
    long = token(0, 100_000)
    parts = split([long], 1, PROGRAMS, 64)
    assert parts is not None
    assert PROGRAMS / 2 < len(parts[0].segments) <= PROGRAMS
    assert all(segment.begin % 64 == 0 for segment in parts[0].segments)
    assert split([long] * 40, 1, PROGRAMS, 64) is None
    assert split([token(0, 2 * LEAST_KEYS - 1)], 1, PROGRAMS, 64) is None
    assert split([], 1, PROGRAMS, 64) is None


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=40), st.sampled_from([33, 132, 264]))
def test_no_program_has_much_more_than_the_others(lens: list[int], programs: int) -> None:
    """The balance holds for any length of one request among others."""
    made = [token(row, num_keys) for row, num_keys in enumerate(lens)]
    share = fair_share(sum(lens), programs)
    parts = split(made, 1, programs, 64) or made
    longest = max(segment.stop - segment.begin for item in parts for segment in item.segments)
    assert longest < 2 * share + 64
    assert sum(len(item.segments) for item in parts) <= len(lens) + programs
    for item, whole in zip(parts, made, strict=True):
        ends = [0, *(segment.stop for segment in item.segments)]
        assert [segment.begin for segment in item.segments] == ends[:-1]
        assert ends[-1] == whole.segments[0].stop
