"""Attention of one token of each of some requests, whose tables lie at fixed places: launches that can be replayed."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.triton.backend import unwritten, unwritten_parts
from workers.attention.triton.tiling import PROGRAMS, fair_share, piece_lens
from workers.kernels.attention import SEGMENT_FIELDS, TILE_FIELDS, attend, blocks_for


class DecodeAttention:
    """For a fixed number of requests. ``fill`` says what the next ``attend`` of every layer is over.

    Whatever the lengths, there are as many tiles: one for each request, and enough to keep a GPU busy. Those of a long
    request are many, so that no program has much more to read than the others.
    """

    def __init__(
        self, num_rows: int, most_pages: int, page_size: int, num_kv_heads: int, query: Tensor, device: torch.device
    ) -> None:
        """``most_pages`` of one request; ``query [1, heads, D]`` is like those to come."""
        self.num_rows, self._page_size, self._num_kv_heads = num_rows, page_size, num_kv_heads
        self._most_pages = most_pages
        self._blocks = blocks_for(query.shape[1] // num_kv_heads, query.shape[2], query.itemsize, page_size)
        self._num_tiles = num_rows + PROGRAMS // num_kv_heads
        sizes = [self._num_tiles * len(fields) for fields in (TILE_FIELDS, SEGMENT_FIELDS)]
        # Two int32 are a word, and 16 bytes what tables begin at a multiple of.
        self._num_words = -(-sum(sizes) // 4) * 2
        self._words = torch.zeros(self._num_words + num_rows * most_pages, dtype=torch.int64, device=device)
        numbers, self._tables = self._words[: self._num_words].view(torch.int32), self._words[self._num_words :]
        self._tiles, self._segments = (
            part.view(self._num_tiles, -1) for part in torch.split(numbers[: sum(sizes)], sizes)
        )
        self.arrived = torch.zeros(self._num_tiles, num_kv_heads, dtype=torch.int32, device=device)
        """See Parts."""

    def fill(self, num_keys: Sequence[int] | NDArray[np.int64], tables: Sequence[NDArray[np.int64]]) -> None:
        """The keys that each request's token sees, at least one, and its pages. Asynchronous on a GPU."""
        assert len(num_keys) == len(tables) == self.num_rows, f"{len(num_keys)} requests of {self.num_rows}"
        lens = np.array(num_keys, dtype=np.int64)
        assert lens.min() > 0, "a token sees itself"
        assert max(map(len, tables)) <= self._most_pages, f"more than {self._most_pages} pages"
        first_pages = np.cumsum([0, *map(len, tables)])
        # Where a GPU reads it, and all in one copy; torch keeps the memory until that is done.
        num_words = self._num_words + int(first_pages[-1])
        on_host = torch.empty(num_words, dtype=torch.int64, pin_memory=self._words.is_cuda)
        words = on_host.numpy()
        numbers = [part.ravel() for part in self._cut(lens, first_pages[:-1])]
        np.concatenate(numbers, out=words.view(np.int32)[: sum(map(len, numbers))])
        np.concatenate(tables, out=words[self._num_words :])
        self._words[:num_words].copy_(on_host, non_blocking=True)

    def _cut(
        self, lens: NDArray[np.int64], first_pages: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tiles and segments, as tiling makes them of any items; tiles that are left have no queries."""
        steps = piece_lens(lens, fair_share(int(lens.sum()), self._num_kv_heads), self._blocks.keys)
        counts = -(-lens // steps)
        rows = np.repeat(np.arange(self.num_rows), counts)
        first_tiles, tile = (np.cumsum(counts) - counts)[rows], np.arange(len(rows))
        parts = tile - first_tiles
        begins = parts * steps[rows]
        stops = np.minimum(begins + steps[rows], lens[rows])
        zeros, ones = np.zeros_like(tile), np.ones_like(tile)
        tiles = np.zeros((self._num_tiles, len(TILE_FIELDS)), dtype=np.int32)
        segments = np.zeros((self._num_tiles, len(SEGMENT_FIELDS)), dtype=np.int32)
        tiles[: len(tile)] = np.stack((rows, ones, zeros, tile, ones, parts, counts[rows], first_tiles, ones), axis=1)
        segments[: len(tile)] = np.stack((first_pages[rows], zeros, begins, stops, lens[rows] - 1, zeros), axis=1)
        return tiles, segments

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Tensor:
        """``query [requests, heads, D]`` over one layer's pages ``[page, H, slot, D]``; a new tensor like the query."""
        assert len(query) == self.num_rows, f"{len(query)} queries of {self.num_rows}"
        result = unwritten(query)
        attend(
            query,
            key_pages,
            value_pages,
            *result,
            tiles=self._tiles,
            segments=self._segments,
            tables=self._tables,
            page_size=self._page_size,
            blocks=self._blocks,
            parts=unwritten_parts(query, self.arrived),
        )
        return result.out
