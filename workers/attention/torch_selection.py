"""Selection of keys in plain torch, and for backends that handle one request at a time."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.interface import AttentionParams
from workers.attention.limits import MOST_SCORED, MOST_SELECTED
from workers.attention.merge import Partial, empty_partial
from workers.attention.selection import (
    NO_KEY,
    Chosen,
    IndexQueries,
    QueryRun,
    attend_rows,
    best_keys,
    index_scores,
)
from workers.device import device_of


class TorchSelection:
    """Selection in plain torch, on any device, a tile of keys or a few queries at a time."""

    queries_at_once = 64
    """Maximum number of queries per call of ``best_keys`` for which it is fast."""

    def prepare_selection(self, runs: Sequence[QueryRun], most_queries: int | None = None) -> "RunByRun":
        return RunByRun(self, runs, most_queries or self.queries_at_once)

    def best_keys(
        self, index: IndexQueries, keys: Tensor, table: Tensor, num_visible: NDArray[np.int64], top_k: int
    ) -> Chosen:
        """Return the best keys of some queries of one request. See ``StepSelection`` and ``QueryRun``."""
        visible = device_of(keys).put(torch.from_numpy(num_visible))[:, None]
        best = Chosen(index.weights.new_empty(len(visible), 0), visible.new_empty(len(visible), 0))
        widest = max(index.weights.numel(), keys.shape[-1])
        for begin, tile in _tiles(keys, table, int(num_visible[-1]), MOST_SCORED // widest):
            numbers = torch.arange(begin, begin + len(tile), device=keys.device)
            scores = index_scores(index, tile)
            if begin + len(tile) > num_visible[0]:
                scores.masked_fill_(numbers >= visible, -torch.inf)
            both = zip(best, (scores, numbers.expand_as(scores)), strict=True)
            best = best_keys(Chosen(*(torch.cat(pair, dim=1) for pair in both)), top_k)
        return best

    def attend_selected(
        self, query: Tensor, keys: Tensor, table: Tensor, selected: Tensor, scale: float, out: Partial
    ) -> None:
        """Write attention of some queries of one request into ``out``, which contains empty partials. See
        ``StepSelection``.
        """
        page_size, value_dim = keys.shape[2], out.out.shape[-1]
        step = max(MOST_SELECTED // max(selected.shape[1] * query.shape[-1], 1), 1)
        for first in range(0, len(query), step):
            mine = slice(first, first + step)
            numbers = counted(selected[mine])[0].long()
            is_seen, numbers = numbers != NO_KEY, numbers.clamp(min=0)
            rows = keys[:, 0][table[numbers // page_size], numbers % page_size].float()
            # A slot that no query sees may hold NaN, which no weight can hide.
            rows.masked_fill_(~is_seen[..., None], 0.0)
            for whole, part in zip(out, attend_rows(query[mine], rows, is_seen, scale, value_dim), strict=True):
                whole[mine] = part


class RunByRun:
    """Selection for one request at a time. See ``StepSelection``."""

    def __init__(self, backend: TorchSelection, runs: Sequence[QueryRun], most_queries: int) -> None:
        self._backend, self._runs = backend, [run for run in runs if len(run.num_visible)]
        parts = [(run, first) for run in self._runs for first in range(0, len(run.num_visible), most_queries)]
        self.batches: Sequence[slice] = [
            slice(run.rows.start + first, min(run.rows.start + first + most_queries, run.rows.stop))
            for run, first in parts
        ]
        self._run_of = {batch.start: run for batch, (run, _) in zip(self.batches, parts, strict=True)}

    def best_keys(self, index: IndexQueries, keys: Tensor, batch: slice, top_k: int) -> Chosen:
        run = self._run_of[batch.start]
        num_visible = run.num_visible[batch.start - run.rows.start : batch.stop - run.rows.start]
        return self._backend.best_keys(index.rows(batch), keys, run.table, num_visible, top_k)

    def attend(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        result = empty_partial(query, params.value_dim)
        for run in self._runs:
            if len(run.table):
                out = Partial(*(part[run.rows] for part in result))
                inputs = query[run.rows], keys, run.table, selected[run.rows]
                self._backend.attend_selected(*inputs, params.scale, out)
        return result


def counted(selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``selected [queries, n]`` without the columns that no query needs, and the number of each query's keys."""
    num_keys = (selected != NO_KEY).sum(-1)
    return selected[:, : int(num_keys.amax())], num_keys


def _tiles(keys: Tensor, table: Tensor, num_keys: int, most_keys: int) -> Iterator[tuple[int, Tensor]]:
    """Yield tiles ``[n, dim]`` of a request's first keys, each with the number of its first key.

    A tile has at most ``most_keys`` keys, or one page.
    """
    page_size = keys.shape[2]
    num_pages = max(most_keys // page_size, 1)
    for begin in range(0, num_keys, num_pages * page_size):
        rows = keys[:, 0].index_select(0, table[begin // page_size :][:num_pages]).flatten(0, 1)
        yield begin, rows[: num_keys - begin]
