"""Keys of a step in pages, of which each query attends only to those that an indexer scores highest."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.attention.selection import NO_KEY, Chosen, IndexQueries, QueryRun
from workers.device import device_of
from workers.engine.owned_pages import OwnedPages

_MOST_QUERIES = 64
"""Number of queries on whose best keys the ranks agree at a time."""

Agree = Callable[[Chosen, int], Tensor]
"""Function that returns which of this rank's best keys, given by position, are among the best of all ranks, given the
number of keys that a query uses.
"""


class SelectableKeys:
    """Keys in pages, numbered by request in order of position."""

    def __init__(
        self,
        backend: AttentionBackend,
        query_runs: Sequence[Run],
        tables: Sequence[Tensor],
        owned: OwnedPages,
        agree: Agree | None = None,
    ) -> None:
        """``tables[request]`` holds the owned pages, int64, in order of position.

        With ``agree``, which is called equally often on all ranks that hold a share of the same keys, only keys that
        are among the best of all ranks are selected.
        """
        self._owned, self._agree = owned, agree
        firsts = np.array([owned.firsts[run.request] for run in query_runs], dtype=np.int64)
        self._firsts = np.repeat(firsts, [run.count for run in query_runs])
        """First page of each query's request."""
        ends = accumulate((run.count for run in query_runs), initial=0)
        runs = []
        for run, begin in zip(query_runs, ends, strict=False):
            num_visible = owned.num_held(run.request, run.first_position + np.arange(run.count) * run.step + 1)
            runs.append(QueryRun(slice(begin, begin + run.count), tables[run.request], num_visible))
        self._step = backend.prepare_selection(runs, None if agree is None else _MOST_QUERIES)

    def select(self, index: IndexQueries, keys: Tensor, top_k: int) -> Tensor:
        """Return the numbers of every query's best keys, int32 ``[queries, top_k]``, followed by ``NO_KEY``.

        ``keys [page, 1, slot, dim]`` are the indexer's keys.
        """
        selected = index.q.new_full((len(self._firsts), top_k), NO_KEY, dtype=torch.int32)
        for batch in self._step.batches:
            found = self._step.best_keys(index, keys, batch, top_k)
            is_kept = found.scores > -torch.inf
            if self._agree is not None:
                firsts = device_of(keys).put(torch.from_numpy(self._firsts[batch]))[:, None]
                is_kept = self._agree(Chosen(found.scores, self._owned.positions(firsts, found.keys)), top_k)
            numbers = found.keys.masked_fill(~is_kept, NO_KEY).int()
            if self._agree is not None:
                numbers = numbers.sort(-1, descending=True).values
            selected[batch, : numbers.shape[1]] = numbers
        return selected

    def attend(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [queries, heads, D]`` to the selected ``keys [page, 1, slot, D]``."""
        return self._step.attend(query, keys, selected, params)
