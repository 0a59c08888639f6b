"""Division of a step's attention into tiles, one per program of the kernel. No torch, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int32]

LEAST_KEYS = 256
"""Minimum number of keys for which a separate partial pays off."""


class Segment(NamedTuple):
    """Keys in one page table or range of rows. See SEGMENT_FIELDS in workers.kernels.attention."""

    table: int
    first_key: int
    begin: int
    stop: int
    ahead: int
    step: int


@dataclass(frozen=True, slots=True)
class Item:
    """Run of queries, and segments of the keys that they see."""

    first_row: int
    num_queries: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    tiles: Indices
    """``[n, 9]``, most work first. See TILE_FIELDS in workers.kernels.attention."""
    segments: Indices
    num_slots: int
    """Number of slots for partial results. 0 if every tile has all keys of its queries."""


def fair_share(num_keys: int, programs: int) -> int:
    """Return the number of keys of each program, of as many as a GPU runs at a time."""
    return max(-(-num_keys // programs), LEAST_KEYS)


def split(items: Sequence[Item], queries_a_tile: int, programs: int, block_keys: int) -> list[Item] | None:
    """Split items into segments of nearly equal work. Return None if there are enough tiles for ``programs`` already.

    A segment shorter than two fair shares is not split, since that would leave only a small remainder.
    """
    lens = [[segment.stop - segment.begin for segment in item.segments] for item in items]
    tiles = [-(-item.num_queries // queries_a_tile) for item in items]
    share = fair_share(sum(count * sum(of_item) for count, of_item in zip(tiles, lens, strict=True)), programs)
    if max((length for of_item in lens for length in of_item), default=0) < 2 * share:
        return None
    parts = [[part for segment in item.segments for part in _split(segment, share, block_keys)] for item in items]
    return [replace(item, segments=tuple(of_item)) for item, of_item in zip(items, parts, strict=True)]


def make_tiles(items: Sequence[Item], queries_a_tile: int, *, in_parts: bool = False) -> Tiling:
    """Divide items into tiles of ``queries_a_tile`` queries. With ``in_parts``, each tile has only one segment."""
    num_segments = np.array([len(item.segments) for item in items], dtype=np.int64)
    num_queries = np.array([item.num_queries for item in items], dtype=np.int64)
    first_rows = np.array([item.first_row for item in items], dtype=np.int64)
    table = np.array([segment for item in items for segment in item.segments], dtype=np.int32).reshape(-1, 6)

    num_tiles = -(-num_queries // queries_a_tile)
    counts = np.maximum(num_segments, 1) if in_parts else np.ones_like(num_segments)
    item_of_tile = np.repeat(np.arange(len(items)), num_tiles * counts)
    within = _count_up(num_tiles * counts)
    part = within % counts[item_of_tile]
    first_index = within // counts[item_of_tile] * queries_a_tile
    # The parts of an item are adjacent, and each has all of the item's queries.
    num_slots = np.where(counts > 1, num_queries * counts, 0)
    first_slots = np.cumsum(num_slots) - num_slots
    tiles = np.stack(
        (
            first_rows[item_of_tile] + first_index,
            np.minimum(queries_a_tile, num_queries[item_of_tile] - first_index),
            first_index,
            (np.cumsum(num_segments) - num_segments)[item_of_tile] + part,
            np.minimum(num_segments[item_of_tile], 1) if in_parts else num_segments[item_of_tile],
            part,
            counts[item_of_tile],
            first_slots[item_of_tile] + first_index,
            num_queries[item_of_tile],
        ),
        axis=1,
    ).astype(np.int32)
    order = np.argsort(-_work(tiles, table), kind="stable")
    return Tiling(np.ascontiguousarray(tiles[order]), table, int(num_slots.sum()))


def token_tiles(counts: NDArray[np.int64]) -> tuple[Indices, NDArray[np.int64], NDArray[np.int64]]:
    """Return tiles of single queries with one segment each, and each tile's query and part.

    ``counts`` are the queries' numbers of segments.
    """
    rows, parts = np.repeat(np.arange(len(counts)), counts), _count_up(counts)
    tile, zeros, ones = np.arange(len(rows)), np.zeros_like(rows), np.ones_like(rows)
    tiles = np.stack((rows, ones, zeros, tile, ones, parts, counts[rows], tile - parts, ones), axis=1)
    return tiles.astype(np.int32), rows, parts


def _split(segment: Segment, share: int, block_keys: int) -> list[Segment]:
    length = segment.stop - segment.begin
    step = int(piece_lens(np.array(length), share, block_keys))
    starts = range(segment.begin, segment.stop, step)
    return [segment._replace(begin=start, stop=min(start + step, segment.stop)) for start in starts]


def piece_lens(num_keys: NDArray[np.int64], share: int, block_keys: int) -> NDArray[np.int64]:
    """Return the piece length for each key count: a multiple of the block size, close to one fair share."""
    num_pieces: NDArray[np.int64] = np.maximum(num_keys // share, 1)
    return -(-num_keys // (num_pieces * block_keys)) * block_keys


def _work(tiles: Indices, segments: Indices) -> NDArray[np.int64]:
    """Return the number of keys that the last query of each tile sees."""
    counts = tiles[:, 4].astype(np.int64)
    tile = np.repeat(np.arange(len(tiles)), counts)
    _, _, begin, stop, ahead, step = segments[np.repeat(tiles[:, 3], counts) + _count_up(counts)].astype(np.int64).T
    last_index = (tiles[:, 2] + tiles[:, 1] - 1).astype(np.int64)[tile]
    seen = np.clip(np.minimum(ahead + last_index * step + 1, stop) - begin, 0, None)
    work = np.zeros(len(tiles), dtype=np.int64)
    np.add.at(work, tile, seen)
    return work


def _count_up(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenated ranges ``0 .. count - 1`` of all counts."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
