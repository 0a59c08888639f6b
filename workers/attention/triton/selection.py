"""Keys with the best scores, and attention to them, on a GPU."""

from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.limits import MOST_SCORED, MOST_SELECTED
from workers.attention.merge import Partial
from workers.attention.selection import Chosen, IndexQueries
from workers.attention.triton.tiling import fair_share, piece_lens
from workers.device import Device, device_of
from workers.kernels.attention import attend, blocks_for
from workers.kernels.partials import unwritten_parts
from workers.kernels.selection import VisibleKeys, choose, locate, score_run, score_tokens

_FEW_QUERIES = 4
"""Maximum number of queries that are faster with a program for each, as in decode."""


class TritonSelection:
    """Selection with the kernels of workers.kernels.selection."""

    queries_at_once = 128

    def best_keys(
        self, index: IndexQueries, keys: Tensor, table: Tensor, num_visible: NDArray[np.int64], top_k: int
    ) -> Chosen:
        """See ``AttentionBackend``. Scores exist for a tile of keys at a time, of which the best are kept."""
        num_queries, device = len(index.q), device_of(keys)
        num_keys = device.put(torch.from_numpy(num_visible.astype(np.int32)))
        visible = VisibleKeys(keys, table, torch.zeros_like(num_keys), num_keys)
        q, weights = index.q.to(keys.dtype), index.weights.contiguous()
        score = score_tokens if num_queries <= _FEW_QUERIES else score_run
        best, numbers = (index.weights.new_empty(num_queries, 0, dtype=kind) for kind in (torch.float32, torch.int32))
        most = int(num_visible[-1])
        for begin in range(0, most, MOST_SCORED // num_queries):
            end, num_best = min(begin + MOST_SCORED // num_queries, most), best.shape[1]
            scores = best.new_empty(num_queries, num_best + end - begin)
            scores[:, :num_best] = best
            score(q, weights, visible, scores[:, num_best:], begin)
            counts = (num_keys - begin).clamp_(0, end - begin).add_(num_best)
            named = None
            if num_best:
                tile = torch.arange(begin, end, dtype=torch.int32, device=keys.device)
                named = torch.cat((numbers, tile.expand(num_queries, -1)), dim=1)
            best, numbers = choose(scores, counts, min(top_k, end), named)
        return Chosen(best, numbers.long())

    def attend_selected(
        self, query: Tensor, keys: Tensor, table: Tensor, selected: Tensor, scale: float, out: Partial
    ) -> None:
        """See ``AttentionBackend``."""
        step = max(MOST_SELECTED // selected.shape[1], 1)
        for first in range(0, len(query), step):
            rows = slice(first, first + step)
            part, mine = query[rows], selected[rows]
            first_pages = torch.zeros(len(part), dtype=torch.int32, device=keys.device)
            visible = VisibleKeys(keys, table, first_pages, first_pages)
            attention = SelectedAttention(part, mine.shape[1], out.out.shape[-1], device_of(keys))
            attention.attend(part, visible, mine, scale, Partial(*(x[rows] for x in out)))


class SelectedAttention:
    """Attention of queries to keys of their own, with inputs at fixed addresses.

    Every query has the same number of tiles, enough to keep a GPU busy, of which some may have no keys.
    """

    def __init__(self, query: Tensor, num_selected: int, value_dim: int, device: Device) -> None:
        """``query [queries, heads, D]`` gives the sizes."""
        num_queries, num_heads, head_dim = query.shape
        self._blocks = blocks_for(
            1, num_heads, head_dim=head_dim, value_dim=value_dim, itemsize=query.itemsize, page_size=1
        )
        num_shares = num_heads // self._blocks.heads
        share = fair_share(num_queries * num_selected, self._blocks.programs // num_shares)
        self._part_len = int(piece_lens(np.array(num_selected), share, self._blocks.keys))
        num_parts = -(-num_selected // self._part_len)
        self._places = torch.zeros(num_queries, num_selected, dtype=torch.int64, device=device.torch_device)
        tiles, segments = _tiles_of(num_queries, num_selected, num_parts, self._part_len)
        self._tiles, self._segments = device.put(torch.from_numpy(tiles)), device.put(torch.from_numpy(segments))
        self._arrived: Tensor | None = None
        if num_parts > 1:
            self._arrived = self._places.new_zeros(len(tiles), num_shares, dtype=torch.int32)

    def attend(self, query: Tensor, visible: VisibleKeys, selected: Tensor, scale: float, out: Partial) -> None:
        """Write attention of ``query`` to ``selected [queries, n]``, whose first elements are the values."""
        keys, value_dim = visible.keys, out.out.shape[-1]
        unit = gcd(keys.stride(0), keys.stride(2))
        locate(selected, visible, unit, self._places, self._segments, self._part_len)
        in_units = keys.as_strided((1, 1, 1, keys.shape[3]), (unit, unit, unit, 1))
        attend(
            query,
            in_units,
            in_units[..., :value_dim],
            *out,
            tiles=self._tiles,
            segments=self._segments,
            tables=self._places,
            page_size=1,
            blocks=self._blocks,
            scale=scale,
            parts=None if self._arrived is None else unwritten_parts(query, value_dim, self._arrived),
        )


def _tiles_of(
    num_queries: int, num_selected: int, num_parts: int, part_len: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return tiles and segments (see workers.kernels.attention) without the segments' ends."""
    at = np.arange(num_queries * num_parts, dtype=np.int32)
    rows, parts = np.divmod(at, num_parts)
    zeros, ones = np.zeros_like(at), np.ones_like(at)
    tiles = (rows, ones, zeros, at, ones, parts, num_parts * ones, rows * num_parts, ones)
    segments = (rows * num_selected, zeros, parts * part_len, zeros, zeros, zeros)
    return np.stack(tiles, axis=1), np.stack(segments, axis=1)
