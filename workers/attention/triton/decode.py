"""Attention of one token per request, with inputs at fixed addresses, so that launches can be captured."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.interface import AttentionParams, GraphShape
from workers.attention.limits import MOST_CAPTURED_SCORES
from workers.attention.merge import Partial, unwritten_partial
from workers.attention.selection import IndexQueries
from workers.attention.triton.selection import SelectedAttention
from workers.attention.triton.tiling import fair_share, piece_lens, token_tiles
from workers.kernels.attention import SEGMENT_FIELDS, TILE_FIELDS, attend, blocks_for
from workers.kernels.partials import unwritten_parts
from workers.kernels.selection import VisibleKeys, choose, score_tokens


class DecodeAttention:
    """Attention of a fixed number of requests. See GraphAttention.

    The number of tiles is fixed: one per request, plus enough to keep a GPU busy. Long requests get several tiles, so
    that all programs read about the same number of keys.
    """

    def __init__(self, shape: GraphShape) -> None:
        self._shape, num_requests = shape, shape.num_requests
        self._blocks = blocks_for(
            1,
            shape.num_heads // shape.num_kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            itemsize=shape.dtype.itemsize,
            page_size=shape.page_size,
        )
        num_shares = shape.num_heads // self._blocks.heads
        self._programs = self._blocks.programs_for(num_shares)
        self._num_tiles = num_requests + self._programs
        sizes = [self._num_tiles * len(fields) for fields in (TILE_FIELDS, SEGMENT_FIELDS)] + [num_requests] * 2
        # A word holds two int32, and tables begin at a multiple of 16 bytes.
        self._num_words = -(-sum(sizes) // 4) * 2
        num_words = self._num_words + num_requests * shape.most_pages
        self._words = torch.zeros(num_words, dtype=torch.int64, device=shape.device.torch_device)
        numbers, self._tables = self._words[: self._num_words].view(torch.int32), self._words[self._num_words :]
        tiles, segments, self._first_pages, self._num_keys = numbers[: sum(sizes)].split_with_sizes(sizes)
        self._tiles, self._segments = (part.view(self._num_tiles, -1) for part in (tiles, segments))
        self._selected: SelectedAttention | None = None
        self.arrived = torch.zeros(self._num_tiles, num_shares, dtype=torch.int32, device=shape.device.torch_device)

    def fill(self, num_keys: Sequence[int], tables: Sequence[NDArray[np.int64]]) -> None:
        num_requests, most_pages = self._shape.num_requests, self._shape.most_pages
        assert len(num_keys) == len(tables) == num_requests, f"got {len(num_keys)} of {num_requests} requests"
        lens = np.array(num_keys, dtype=np.int64)
        assert lens.min() > 0, "a token must see at least its own key"
        assert max(map(len, tables)) <= most_pages, f"a request has more than {most_pages} pages"
        first_pages = np.cumsum([0, *map(len, tables)])
        # One copy moves everything to the GPU. Torch keeps the host memory until the copy is done.
        num_words = self._num_words + int(first_pages[-1])
        on_host = torch.empty(num_words, dtype=torch.int64, pin_memory=self._shape.device.is_asynchronous)
        words = on_host.numpy()
        numbers = [part.ravel() for part in (*self._split(lens, first_pages[:-1]), first_pages[:-1], lens)]
        np.concatenate(numbers, out=words.view(np.int32)[: sum(map(len, numbers))], casting="same_kind")
        np.concatenate(tables, out=words[self._num_words :])
        self._words[:num_words].copy_(on_host, non_blocking=True)

    def _split(
        self, lens: NDArray[np.int64], first_pages: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return tiles and segments like ``tiling.make_tiles``, in request order, with empty tiles at the end."""
        steps = piece_lens(lens, fair_share(int(lens.sum()), self._programs), self._blocks.keys)
        used, rows, parts = token_tiles(-(-lens // steps))
        begins = parts * steps[rows]
        stops, zeros = np.minimum(begins + steps[rows], lens[rows]), np.zeros_like(rows)
        tiles = np.zeros((self._num_tiles, len(TILE_FIELDS)), dtype=np.int32)
        segments = np.zeros((self._num_tiles, len(SEGMENT_FIELDS)), dtype=np.int32)
        tiles[: len(used)] = used
        segments[: len(used)] = np.stack((first_pages[rows], zeros, begins, stops, lens[rows] - 1, zeros), axis=1)
        return tiles, segments

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        num_requests, value_dim = self._shape.num_requests, value_pages.shape[-1]
        assert len(query) == num_requests, f"got {len(query)} queries, but the graph has {num_requests}"
        result = unwritten_partial(query, value_dim)
        attend(
            query,
            key_pages,
            value_pages,
            *result,
            tiles=self._tiles,
            segments=self._segments,
            tables=self._tables,
            page_size=self._shape.page_size,
            blocks=self._blocks,
            scale=params.scale,
            window=params.window,
            parts=unwritten_parts(query, value_dim, self.arrived),
        )
        return result

    def best_keys(self, index: IndexQueries, keys: Tensor, top_k: int) -> Tensor:
        """See ``GraphAttention``. Few requests are scored at a time, since there may be as many keys as a model has."""
        most_keys = self._shape.most_pages * self._shape.page_size
        step = max(MOST_CAPTURED_SCORES // most_keys, 1)
        chosen = []
        for first in range(0, self._shape.num_requests, step):
            rows = slice(first, first + step)
            q, weights = index.rows(rows)
            visible = VisibleKeys(keys, self._tables, self._first_pages[rows], self._num_keys[rows])
            scores = weights.new_empty(len(q), most_keys)
            score_tokens(q, weights, visible, scores)
            chosen.append(choose(scores, visible.num_keys, top_k)[1])
        return torch.cat(chosen)

    def attend_selected(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        assert params.value_dim is not None, "values must be part of their keys"
        result = unwritten_partial(query, params.value_dim)
        if self._selected is None:
            self._selected = SelectedAttention(query, selected.shape[1], params.value_dim, self._shape.device)
        visible = VisibleKeys(keys, self._tables, self._first_pages, self._num_keys)
        self._selected.attend(query, visible, selected, params.scale, result)
        return result
