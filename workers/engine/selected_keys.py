"""Keys of a step in pages, of which each query attends only to those that an indexer scores highest."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams
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
        """Return the numbers of every query's best keys, int32 ``[queries, top_k]``, followed by ``NO_KEY``.

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
                numbers = found.keys.masked_fill(~is_kept, NO_KEY).int()
                if agree is not None:
                    numbers = numbers.sort(-1, descending=True).values
                selected[rows, : numbers.shape[1]] = numbers
        return selected

    def attend(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [queries, heads, D]`` to the selected ``keys [page, 1, slot, D]``."""
        assert params.value_dim is not None, "values must be part of their keys"
        result = empty_partial(query, params.value_dim)
        for run, begin in self._runs:
            if len(table := self._tables[run.request]):
                rows = slice(begin, begin + run.count)
                out = Partial(*(part[rows] for part in result))
                self._backend.attend_selected(query[rows], keys, table, selected[rows], params.scale, out)
        return result
