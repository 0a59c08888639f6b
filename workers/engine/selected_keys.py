"""Keys of a step in pages, of which each query attends only to those that an indexer scores highest."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.limits import MOST_SELECTED
from workers.attention.merge import Partial, empty_partial
from workers.attention.runs import Run
from workers.attention.selection import NO_KEY, Chosen, IndexQueries
from workers.engine.page_share import PageShare

_MOST_QUERIES = 64
"""Number of queries on whose best keys the ranks agree at a time."""

Agree = Callable[[Chosen], Tensor]
"""Function that returns which of this rank's best keys, given by position, are among the best of all ranks."""


class SelectableKeys:
    """Keys in pages, numbered by request in order of position."""

    def __init__(
        self, backend: AttentionBackend, query_runs: Sequence[Run], tables: Sequence[Tensor], share: PageShare
    ) -> None:
        """``tables[request]`` holds the pages of the share, int64, in order of position."""
        self._backend, self._tables, self._share = backend, tables, share
        ends = accumulate((run.count for run in query_runs), initial=0)
        self._runs = [(run, begin) for run, begin in zip(query_runs, ends, strict=False) if run.count]
        self._num_queries = sum(run.count for run in query_runs)

    def select(self, index: IndexQueries, keys: Tensor, top_k: int, agree: Agree | None = None) -> Tensor:
        """Return the numbers of every query's best keys, int32 ``[queries, top_k]``, filled with ``NO_KEY``.

        ``keys [page, 1, slot, dim]`` are the indexer's keys. With ``agree``, which is called equally often on all ranks
        that hold a share of the same keys, only keys that are among the best of all ranks are returned.
        """
        selected = index.q.new_full((self._num_queries, top_k), NO_KEY, dtype=torch.int32)
        at_once = self._backend.queries_at_once if agree is None else _MOST_QUERIES
        for run, begin in self._runs:
            for first in range(0, run.count, at_once):
                count = min(at_once, run.count - first)
                rows = slice(begin + first, begin + first + count)
                positions = run.first_position + (first + np.arange(count)) * run.step
                num_visible = self._share.num_held(run.request, positions + 1)
                found = self._backend.best_keys(index.rows(rows), keys, self._tables[run.request], num_visible, top_k)
                is_kept = found.scores > -torch.inf
                if agree is not None:
                    is_kept = agree(Chosen(found.scores, self._share.positions(run.request, found.keys)))
                selected[rows, : found.keys.shape[1]] = found.keys.masked_fill(~is_kept, NO_KEY).int()
        return selected

    def attend(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [queries, heads, D]`` to the selected ``keys [page, 1, slot, D]``."""
        assert params.value_dim is not None, "values must be part of their keys"
        result: Partial | None = None
        # Neither numbers of keys nor results of one call take much memory.
        step = max(MOST_SELECTED // max(selected.shape[1], query.shape[1] * params.value_dim), 1)
        for run, begin in self._runs:
            table = self._tables[run.request]
            for first in range(begin, begin + run.count if len(table) else begin, step):
                rows = slice(first, min(first + step, begin + run.count))
                numbers = _dense(selected[rows])
                found = self._backend.attend_selected(query[rows], keys, table, numbers, params.scale, params.value_dim)
                if len(found.lse) == self._num_queries:
                    return found
                result = result or self._unseen(found)
                for whole, part in zip(result, found, strict=True):
                    whole[rows] = part
        return result or empty_partial(query, params.value_dim)

    def _unseen(self, like: Partial) -> Partial:
        """Return the partial of all queries, none of which has seen a key, with the dtypes and heads of another one."""
        out, lse = (x.new_empty(self._num_queries, *x.shape[1:]) for x in like)
        return Partial(out.zero_(), lse.fill_(-torch.inf))


def _dense(selected: Tensor) -> Tensor:
    """Move a query's keys to the front, and drop the columns that no query needs, of ``selected [queries, n]``."""
    is_seen = selected != NO_KEY
    most = int(is_seen.sum(-1).amax())
    has_gaps = bool((is_seen[:, 1:] & ~is_seen[:, :-1]).any())
    return (selected.sort(-1, descending=True).values if has_gaps else selected)[:, :most]
