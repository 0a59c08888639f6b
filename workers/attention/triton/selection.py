"""Keys with the best scores, and attention to them, on a GPU."""

from collections.abc import Sequence
from functools import cached_property
from math import gcd

import numpy as np
import torch
from torch import Tensor

from workers.attention.interface import AttentionParams
from workers.attention.limits import MOST_SCORED
from workers.attention.merge import Partial, unwritten_partial
from workers.attention.selection import Chosen, IndexQueries, QueryRun
from workers.attention.triton.tiling import fair_share, piece_lens, token_tiles
from workers.device import Device, device_of
from workers.kernels.attention import SEGMENT_FIELDS, attend, blocks_for
from workers.kernels.partials import unwritten_parts
from workers.kernels.selection import VisibleKeys, choose, locate, score_run, score_tokens

_FEW_QUERIES = 4
"""Maximum number of queries of a run that are faster with programs for each, as in decode."""
_QUERIES_AT_ONCE = 128
_MOST_PLACES = 1 << 20
"""Maximum number of selected keys that are found at a time, unless a single query has more."""


class TritonSelection:
    """Selection with the kernels of workers.kernels.selection."""

    def prepare_selection(self, runs: Sequence[QueryRun], most_queries: int | None = None) -> "SelectionStep":
        return SelectionStep([run for run in runs if len(run.num_visible)], most_queries or _QUERIES_AT_ONCE)


class SelectionStep:
    """Selection for many requests at a time, if they have few queries each. See ``StepSelection``."""

    def __init__(self, runs: Sequence[QueryRun], most_queries: int) -> None:
        self._counts = [len(run.num_visible) for run in runs]
        self._num_visible = np.concatenate([np.zeros(0, np.int64), *(run.num_visible for run in runs)])
        self.batches: Sequence[slice] = batches_of(self._counts, most_queries)
        begins = np.cumsum([0, *self._counts])[:-1].tolist()
        self._few = {begin for begin, count in zip(begins, self._counts, strict=True) if count <= _FEW_QUERIES}
        """First queries of runs with few queries."""
        self._tables = [run.table for run in runs]
        self._attentions: dict[int, SelectedAttention] = {}
        """Attention by number of queries."""

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tables of all requests, and each query's first page and number of keys."""
        tables = torch.cat(self._tables)
        first_pages = np.cumsum([0, *map(len, self._tables)])[:-1]
        of_queries = np.stack((np.repeat(first_pages, self._counts), self._num_visible)).astype(np.int32)
        return tables, *device_of(tables).put(torch.from_numpy(of_queries))

    def _seen_by(self, rows: slice, keys: Tensor) -> VisibleKeys:
        tables, first_pages, num_keys = self._on_device
        return VisibleKeys(keys, tables, first_pages[rows], num_keys[rows])

    def best_keys(self, index: IndexQueries, keys: Tensor, batch: slice, top_k: int) -> Chosen:
        """See ``StepSelection``. Scores exist for a tile of keys at a time, of which the best are kept."""
        visible, (q, weights) = self._seen_by(batch, keys), index.rows(batch)
        q, weights = q.to(keys.dtype), weights.contiguous()
        score = score_tokens if batch.start in self._few else score_run
        best, numbers = (weights.new_empty(len(q), 0, dtype=kind) for kind in (torch.float32, torch.int32))
        most = int(self._num_visible[batch].max())
        for begin in range(0, most, MOST_SCORED // len(q)):
            end, num_best = min(begin + MOST_SCORED // len(q), most), best.shape[1]
            scores = best.new_empty(len(q), num_best + end - begin)
            scores[:, :num_best] = best
            score(q, weights, visible, scores[:, num_best:], begin)
            counts = (visible.num_keys - begin).clamp_(0, end - begin).add_(num_best)
            named = None
            if num_best:
                tile = torch.arange(begin, end, dtype=torch.int32, device=keys.device)
                named = torch.cat((numbers, tile.expand(len(q), -1)), dim=1)
            best, numbers = choose(scores, counts, min(top_k, end), named)
        return Chosen(best, numbers.long())

    def attend(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        assert params.value_dim is not None, "values must be part of their keys"
        result = unwritten_partial(query, params.value_dim)
        step = max(_MOST_PLACES // selected.shape[1], 1)
        for first in range(0, len(query), step):
            rows = slice(first, first + step)
            part, out = query[rows], Partial(*(x[rows] for x in result))
            attention = self._attentions.get(len(part))
            if attention is None:
                attention = SelectedAttention(part, selected.shape[1], params.value_dim, device_of(part))
                self._attentions[len(part)] = attention
            attention.attend(part, self._seen_by(rows, keys), selected[rows], params.scale, out)
        return result


def batches_of(counts: Sequence[int], most_queries: int) -> list[slice]:
    """Divide queries into batches of one run each, or of several runs with few queries. ``counts`` are by run."""
    batches: list[slice] = []
    begin, is_open = 0, False
    for count in counts:
        end, is_few = begin + count, count <= _FEW_QUERIES
        if is_few and is_open and end - batches[-1].start <= most_queries:
            batches[-1] = slice(batches[-1].start, end)
        else:
            batches += [slice(first, min(first + most_queries, end)) for first in range(begin, end, most_queries)]
        begin, is_open = end, is_few
    return batches


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
        share = fair_share(num_queries * num_selected, self._blocks.programs_for(num_shares))
        self._part_len = int(piece_lens(np.array(num_selected), share, self._blocks.keys))
        num_parts = -(-num_selected // self._part_len)
        self._places = torch.zeros(num_queries, num_selected, dtype=torch.int64, device=device.torch_device)
        tiles, rows, parts = token_tiles(np.full(num_queries, num_parts))
        segments = np.zeros((len(tiles), len(SEGMENT_FIELDS)), dtype=np.int32)
        segments[:, 0], segments[:, 2] = rows * num_selected, parts * self._part_len
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
