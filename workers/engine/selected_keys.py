"""Keys of a step in pages, of which each query attends only to those that an indexer scores highest.

Scores and selected rows exist for a few queries and keys at a time, so that memory does not grow with the context.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from workers.attention.interface import AttentionParams
from workers.attention.merge import Partial, empty_partial
from workers.attention.runs import Run
from workers.attention.selection import Chosen, IndexQueries, attend_rows, best_keys, index_scores
from workers.device import device_of
from workers.engine.page_share import PageShare
from workers.layers.config import MOST_SCORED, MOST_SELECTED

NO_KEY = -1
_MOST_QUERIES = 64
"""Maximum number of queries that are scored together."""

Agree = Callable[[Chosen], Tensor]
"""Function that returns which of this rank's best keys, given by position, are among the best of all ranks."""


class SelectableKeys:
    """Keys in pages, numbered by request in order of position."""

    def __init__(self, query_runs: Sequence[Run], tables: Sequence[Tensor], share: PageShare) -> None:
        """``tables[request]`` holds the pages of the share, int64, in order of position."""
        self._tables, self._share = tables, share
        ends = accumulate((run.count for run in query_runs), initial=0)
        self._runs = [(run, begin) for run, begin in zip(query_runs, ends, strict=False) if run.count]
        self._num_queries = sum(run.count for run in query_runs)

    def select(self, index: IndexQueries, keys: Tensor, top_k: int, agree: Agree | None = None) -> Tensor:
        """Return the numbers of every query's best keys, int32 ``[queries, top_k]``, filled with ``NO_KEY``.

        ``keys [page, 1, slot, dim]`` are the indexer's keys. With ``agree``, which is called equally often on all ranks
        that hold a share of the same keys, only keys that are among the best of all ranks are returned.
        """
        selected = index.q.new_full((self._num_queries, top_k), NO_KEY, dtype=torch.int32)
        for run, begin in self._runs:
            for first in range(0, run.count, _MOST_QUERIES):
                count = min(_MOST_QUERIES, run.count - first)
                rows = slice(begin + first, begin + first + count)
                block = Run(run.request, run.first_position + first * run.step, count, run.step)
                found = self._best(block, index.rows(rows), keys, top_k)
                is_kept = found.scores > -torch.inf
                if agree is not None:
                    positions = self._share.positions(run.request, found.keys)
                    is_kept = agree(Chosen(found.scores, positions))
                selected[rows, : found.keys.shape[1]] = found.keys.masked_fill(~is_kept, NO_KEY).int()
        return selected

    def attend(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [queries, heads, D]`` to the selected ``keys [page, 1, slot, D]``, in fp32."""
        assert params.value_dim is not None, "values must be part of their keys"
        empty, lse = empty_partial(query, params.value_dim)
        result = Partial(empty.float(), lse)
        step = max(MOST_SELECTED // (selected.shape[1] * query.shape[-1]), 1)
        for run, begin in self._runs:
            for first in range(begin, begin + run.count, step):
                rows = slice(first, min(first + step, begin + run.count))
                gathered, is_seen = self._gather(run.request, _dense(selected[rows]), keys)
                found = attend_rows(query[rows], gathered, is_seen, params.scale, params.value_dim)
                for whole, part in zip(result, found, strict=True):
                    whole[rows] = part
        return result

    def _best(self, block: Run, index: IndexQueries, keys: Tensor, top_k: int) -> Chosen:
        """Return the best keys of a few queries of one request, a tile of keys at a time."""
        positions = block.first_position + block.step * np.arange(block.count)
        num_visible = self._share.num_held(block.request, positions + 1)
        visible = device_of(keys).put(torch.from_numpy(num_visible))[:, None]
        best = Chosen(index.weights.new_empty(block.count, 0), visible.new_empty(block.count, 0))
        widest = max(index.weights.numel(), keys.shape[-1])
        for begin, tile in self._tiles(block.request, int(num_visible[-1]), keys, MOST_SCORED // widest):
            numbers = torch.arange(begin, begin + len(tile), device=keys.device)
            scores = index_scores(index, tile)
            if begin + len(tile) > num_visible[0]:
                scores.masked_fill_(numbers >= visible, -torch.inf)
            both = zip(best, (scores, numbers.expand_as(scores)), strict=True)
            best = best_keys(Chosen(*(torch.cat(pair, dim=1) for pair in both)), top_k)
        return best

    def _tiles(self, request: int, num_keys: int, keys: Tensor, most_keys: int) -> Iterator[tuple[int, Tensor]]:
        """Yield tiles ``[n, dim]`` of a request's first keys, each with the number of its first key.

        A tile has at most ``most_keys`` keys, or one page.
        """
        page_size = self._share.page_size
        num_pages = max(most_keys // page_size, 1)
        for begin in range(0, num_keys, num_pages * page_size):
            pages = self._tables[request][begin // page_size :][:num_pages]
            rows = keys[:, 0].index_select(0, pages).flatten(0, 1)
            yield begin, rows[: num_keys - begin]

    def _gather(self, request: int, selected: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return selected rows ``[queries, n, D]`` in fp32, and which of them count, bool ``[queries, n]``."""
        is_seen = selected != NO_KEY
        numbers = selected.clamp(min=0).long()
        table, page_size = self._tables[request], self._share.page_size
        if not len(table):
            return keys.new_zeros(*selected.shape, keys.shape[-1], dtype=torch.float32), is_seen
        rows = keys[:, 0][table[numbers // page_size], numbers % page_size].float()
        # A slot that no query sees may hold NaN, which no weight can hide.
        return rows.masked_fill_(~is_seen[..., None], 0.0), is_seen


def _dense(selected: Tensor) -> Tensor:
    """Drop the columns that no query needs, of ``selected [queries, n]``."""
    most = int((selected != NO_KEY).sum(-1).amax())
    return selected if most == selected.shape[1] else selected.sort(-1, descending=True).values[:, :most]
