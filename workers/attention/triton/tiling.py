"""How one step's attention is cut into tiles, one for each program of the kernel. No torch, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int32]

PROGRAMS = 2 * 132
"""As many keep every multiprocessor of an H100 or H200 busy; work of fewer is split by keys."""
LEAST_KEYS = 256
"""Fewer are not worth a partial of their own."""


class Segment(NamedTuple):
    """Keys in one place; see SEGMENT_FIELDS of workers.kernels.attention."""

    table: int
    first_key: int
    begin: int
    stop: int
    ahead: int
    step: int


@dataclass(frozen=True, slots=True)
class Item:
    """A run of queries and all the keys that it sees some of."""

    first_row: int
    num_queries: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """The work of one launch."""

    tiles: Indices
    """``[n, 7]``, most work first."""
    segments: Indices
    """``[m, 6]``"""
    num_places: int
    """Partials of the rows that have most; 1: nothing is to be merged."""
    rows: Indices
    """Rows of the queries; where there is more than one place, target rows are numbered in this order."""
    counts: Indices
    """Partials of each of the rows."""


def split_len(items: Sequence[Item], queries_a_tile: int, num_kv_heads: int, block_keys: int) -> int | None:
    """Keys of a partial, where there are too few tiles to keep a GPU busy; None: all of them."""
    num_programs = num_kv_heads * sum(-(-item.num_queries // queries_a_tile) for item in items)
    longest = max((segment.stop - segment.begin for item in items for segment in item.segments), default=0)
    most_splits = min(PROGRAMS // max(num_programs, 1), longest // LEAST_KEYS)
    if most_splits < 2:
        return None
    return -(-longest // (most_splits * block_keys)) * block_keys


def cut(items: Sequence[Item], queries_a_tile: int, keys_a_split: int | None) -> Tiling:
    """Tiles of so many queries; each of their segments in splits of so many keys."""
    segments = [list(item.segments) for item in items]
    if keys_a_split is not None:
        segments = [[part for segment in of_item for part in _split(segment, keys_a_split)] for of_item in segments]
    num_segments = np.array([len(of_item) for of_item in segments], dtype=np.int64)
    num_queries = np.array([item.num_queries for item in items], dtype=np.int64)
    first_rows = np.array([item.first_row for item in items], dtype=np.int64)
    table = np.array([segment for of_item in segments for segment in of_item], dtype=np.int32).reshape(-1, 6)
    is_split = keys_a_split is not None and bool(np.any(num_segments > 1))

    num_tiles = -(-num_queries // queries_a_tile)
    places = np.maximum(num_segments, 1) if is_split else np.ones_like(num_segments)
    item_of_tile = np.repeat(np.arange(len(items)), num_tiles * places)
    within = _count_up(num_tiles * places)
    place = within % places[item_of_tile]
    first_index = within // places[item_of_tile] * queries_a_tile
    first_segment = (np.cumsum(num_segments) - num_segments)[item_of_tile] + place
    count = np.minimum(num_segments[item_of_tile], 1) if is_split else num_segments[item_of_tile]
    targets = (np.cumsum(num_queries) - num_queries) if is_split else first_rows
    tiles = np.stack(
        (
            first_rows[item_of_tile] + first_index,
            np.minimum(queries_a_tile, num_queries[item_of_tile] - first_index),
            first_index,
            first_segment,
            count,
            targets[item_of_tile] + first_index,
            place,
        ),
        axis=1,
    ).astype(np.int32)
    order = np.argsort(-_work(tiles, table), kind="stable")
    rows = np.repeat(first_rows, num_queries) + _count_up(num_queries)
    return Tiling(
        tiles=np.ascontiguousarray(tiles[order]),
        segments=table,
        num_places=int(places.max(initial=1)),
        rows=rows.astype(np.int32),
        counts=np.repeat(places, num_queries).astype(np.int32),
    )


def _split(segment: Segment, num_keys: int) -> list[Segment]:
    starts = range(segment.begin, segment.stop, num_keys)
    return [segment._replace(begin=start, stop=min(start + num_keys, segment.stop)) for start in starts]


def _work(tiles: Indices, segments: Indices) -> NDArray[np.int64]:
    """Keys that the last query of each tile sees."""
    counts = tiles[:, 4].astype(np.int64)
    tile = np.repeat(np.arange(len(tiles)), counts)
    _, _, begin, stop, ahead, step = segments[np.repeat(tiles[:, 3], counts) + _count_up(counts)].astype(np.int64).T
    last_index = (tiles[:, 2] + tiles[:, 1] - 1).astype(np.int64)[tile]
    seen = np.clip(np.minimum(ahead + last_index * step + 1, stop) - begin, 0, None)
    work = np.zeros(len(tiles), dtype=np.int64)
    np.add.at(work, tile, seen)
    return work


def _count_up(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... for each of some counts, one after another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
