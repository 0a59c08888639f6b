"""Attention of one token of each of some requests, whose tables lie at fixed places: launches that can be replayed."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.triton.tiling import PROGRAMS
from workers.context_parallel.merge import Partial
from workers.device import on_device
from workers.kernels.attention import attend, blocks_for
from workers.kernels.merge import merge_places

_MOST_SPLITS = 64


class DecodeAttention:
    """For a fixed number of requests. ``fill`` says what the next ``attend`` of every layer is over."""

    def __init__(
        self, num_rows: int, most_pages: int, page_size: int, num_kv_heads: int, query: Tensor, device: torch.device
    ) -> None:
        """``most_pages`` of one request; ``query [1, heads, D]`` is like those to come."""
        self.num_rows, self._page_size = num_rows, page_size
        self._most_pages = most_pages
        self._num_splits = max(1, min(PROGRAMS // (num_rows * num_kv_heads), _MOST_SPLITS))
        self._blocks = blocks_for(query.shape[1] // num_kv_heads, query.shape[2], query.itemsize, page_size)
        num_tiles = num_rows * self._num_splits
        self._numbers = torch.zeros(num_tiles * 13 + num_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(num_rows * most_pages, dtype=torch.int64, device=device)
        self._tiles = self._numbers[: num_tiles * 7].view(num_tiles, 7)
        self._segments = self._numbers[num_tiles * 7 : num_tiles * 13].view(num_tiles, 6)
        self._counts = self._numbers[num_tiles * 13 :]
        self._rows = torch.arange(num_rows, dtype=torch.int32, device=device)

    def fill(self, num_keys: Sequence[int], tables: Sequence[NDArray[np.int64]]) -> None:
        """The keys that each request's token sees, at least one, and its pages. Asynchronous on a GPU."""
        assert len(num_keys) == len(tables) == self.num_rows, f"{len(num_keys)} requests of {self.num_rows}"
        lens = np.array(num_keys, dtype=np.int32)
        assert lens.min() > 0, "a token sees itself"
        assert max(map(len, tables)) <= self._most_pages, f"more than {self._most_pages} pages"
        splits = np.arange(self._num_splits, dtype=np.int32)
        keys_a_split = -(-lens // (self._num_splits * self._blocks.keys)) * self._blocks.keys
        begins = keys_a_split[:, None] * splits
        is_used = begins < lens[:, None]
        rows = np.arange(self.num_rows, dtype=np.int32)[:, None]
        first_pages = np.cumsum([0, *map(len, tables)], dtype=np.int32)[:-1, None]
        stops = np.minimum(begins + keys_a_split[:, None], lens[:, None])
        zeros, segment = np.zeros_like(begins), rows * self._num_splits + splits
        tiles = _columns(rows + zeros, is_used, zeros, segment, zeros + 1, rows + zeros, splits + zeros)
        segments = _columns(first_pages + zeros, zeros, begins, stops, lens[:, None] - 1 + zeros, zeros)
        counts = is_used.sum(axis=1, dtype=np.int32)
        self._numbers.copy_(
            on_device(torch.from_numpy(np.concatenate([tiles, segments, counts])), self._numbers.device)
        )
        pages = np.concatenate(tables)
        self._tables[: len(pages)].copy_(on_device(torch.from_numpy(pages), self._tables.device))

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Tensor:
        """``query [requests, heads, D]`` over one layer's pages ``[page, H, slot, D]``; a new tensor like the query."""
        assert len(query) == self.num_rows, f"{len(query)} queries of {self.num_rows}"
        out = query.new_empty(query.shape)
        result = Partial(out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        found = Partial(result.out[None], result.lse[None])
        if self._num_splits > 1:
            shape = (self._num_splits, *query.shape)
            found = Partial(query.new_empty(shape, dtype=torch.float32), result.lse.new_empty(shape[:-1]))
        attend(
            query,
            key_pages,
            value_pages,
            *found,
            tiles=self._tiles,
            segments=self._segments,
            tables=self._tables,
            page_size=self._page_size,
            blocks=self._blocks,
        )
        if self._num_splits > 1:
            merge_places(*found, self._counts, self._rows, *result)
        return out


def _columns(*columns: NDArray[np.int32] | NDArray[np.bool_]) -> NDArray[np.int32]:
    """One row a split, of all requests, flat."""
    return np.stack([column.astype(np.int32) for column in columns], axis=-1).ravel()
