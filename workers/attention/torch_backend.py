"""Attention in plain torch: on a CPU, and as the reference anywhere. Divides a step into extends and single tokens.

T: queries, S: keys, H: kv heads, G: query heads a kv head, D: head dim, R: requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from cluster.spec.kv import pages_for
from workers.attention.extend import extend
from workers.attention.interface import RowAttention, StepAttention
from workers.attention.paged import PlacedRun, gather_key_value, page_rows
from workers.attention.rows import TorchRows
from workers.attention.single_tokens import BLOCK_SLOTS, SingleBatch
from workers.context_parallel.merge import Partial, empty_partial, merge
from workers.context_parallel.runs import Run

_MAX_BATCH_SLOTS = BLOCK_SLOTS
"""Keys of several single-token runs that are attended together."""


class TorchAttention:
    """Copies the pages of a request once a layer; which kernel attends depends on dtype and lengths."""

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> StepAttention:
        """See AttentionBackend."""
        starts = accumulate((run.count for run in runs), initial=0)
        placed = [PlacedRun(run, first_row) for run, first_row in zip(runs, starts, strict=False)]
        if key_lens is not None:
            return _TorchStep(_prefixes(placed, page_tables, page_size, key_lens))
        longer: dict[int, list[PlacedRun]] = {}
        for item in placed:
            if item.run.count > 1:
                longer.setdefault(item.run.request, []).append(item)
        extends = [_Extend.build(items, page_tables[request], page_size) for request, items in longer.items()]
        singles = [item for item in placed if item.run.count == 1]
        batches = [SingleBatch.build(batch, page_tables, page_size) for batch in _batches(singles, page_size)]
        return _TorchStep([*extends, *batches])

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        """See AttentionBackend."""
        return TorchRows(query_runs, key_runs)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A run all of whose queries see the same keys."""

    item: PlacedRun
    table: Tensor
    num_keys: int

    def attend_into(self, result: Partial, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
        rows = page_rows(self.table, key_pages.shape[1])
        key, value = (copy[0, :, : self.num_keys] for copy in gather_key_value(rows, key_pages, value_pages))
        mine = slice(self.item.first_row, self.item.first_row + self.item.run.count)
        out, lse = extend(query[mine], key, value, None)
        result.out[mine] = out
        result.lse[mine] = lse


def _prefixes(
    placed: Sequence[PlacedRun], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int]
) -> list[_Prefix]:
    prefixes = []
    for item in placed:
        num_keys = key_lens[item.run.request]
        if num_keys and item.run.count:
            table = page_tables[item.run.request][: pages_for(num_keys, page_size)]
            prefixes.append(_Prefix(item, table[None], num_keys))
    return prefixes


@dataclass(frozen=True, slots=True)
class _Extend:
    """The runs of more than one token of one request."""

    items: list[PlacedRun]
    table: Tensor
    num_keys: int

    @classmethod
    def build(cls, items: list[PlacedRun], table: Tensor, page_size: int) -> "_Extend":
        num_keys = max(item.run.last_position for item in items) + 1
        return cls(items, table[: -(-num_keys // page_size)][None], num_keys)

    def attend_into(self, result: Partial, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
        rows = page_rows(self.table, key_pages.shape[1])
        key, value = (copy[0, :, : self.num_keys] for copy in gather_key_value(rows, key_pages, value_pages))
        for item in self.items:
            mine = slice(item.first_row, item.first_row + item.run.count)
            out, lse = _attend_run(query[mine], key, value, item.run)
            result.out[mine] = out
            result.lse[mine] = lse


class _TorchStep:
    """The work of one step."""

    def __init__(self, parts: Sequence[_Extend | SingleBatch | _Prefix]) -> None:
        self._parts = parts

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Partial:
        result = empty_partial(query)
        for part in self._parts:
            part.attend_into(result, query, key_pages, value_pages)
        return result


def _batches(singles: list[PlacedRun], page_size: int) -> list[list[PlacedRun]]:
    """Put requests of like length together, so that little is gathered for nothing."""
    batches: list[list[PlacedRun]] = []
    longest = 0
    for item in sorted(singles, key=lambda item: -item.run.first_position):
        num_keys = item.run.first_position + 1
        alike = longest - num_keys <= max(longest // 4, 8 * page_size)
        if batches and alike and (len(batches[-1]) + 1) * longest <= _MAX_BATCH_SLOTS:
            batches[-1].append(item)
        else:
            batches.append([item])
            longest = num_keys
    return batches


def _attend_run(query: Tensor, key: Tensor, value: Tensor, run: Run) -> Partial:
    """Queries ``[T, heads, D]`` at the run's positions over keys ``[H, S, D]`` at 0..S-1.

    Keys before the run are seen by all its queries. From the run's first position on, keys fall into ``step``
    classes by position modulo step. Query j sees the first j + 1 keys of its own class and the first j of any
    other: a plain causal triangle each, so that no strategy needs a mask.
    """
    first, end = run.first_position, run.last_position + 1
    if run.step == 1:
        return extend(query, key[:, :end], value[:, :end], first)
    partials = [extend(query, key[:, first : end : run.step], value[:, first : end : run.step], 0)]
    if first:
        partials.append(extend(query, key[:, :first], value[:, :first], None))
    for begin in range(first + 1, first + run.step):
        keys = slice(begin, end, run.step)
        out, lse = extend(query[1:], key[:, keys], value[:, keys], 0)
        partials.append(Partial(pad(out, (0, 0, 0, 0, 1, 0)), pad(lse, (0, 0, 1, 0), value=-torch.inf)))
    return merge(partials)
