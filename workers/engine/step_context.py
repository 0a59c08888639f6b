"""Base of the attention contexts of all modes: one step on one rank, and the rows that it exchanges."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial, merge_in_turn, with_sinks
from workers.attention.runs import Run, sees_any
from workers.attention.selection import IndexQueries
from workers.context_parallel.exchange import Ring, RowGather
from workers.device import device_of
from workers.engine.batch import StepBatch
from workers.engine.selected_keys import SelectableKeys
from workers.engine.step_keys import PrefixKeys, RowKeys
from workers.layers.attention import AttentionContext, AttentionWork, Expand
from workers.memory.page_pool import PagePool
from workers.parallel.communicator import Communicator
from workers.parallel.exchanges import gather_rows


class CpExchange:
    """Row exchanges in a CP group, and their buffers. One per worker."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self.kv_gather = RowGather(group)
        self.query_gather = RowGather(group)
        self.index_gather = RowGather(group)
        self.ring = Ring(group)

    def overlaps(self, batch: StepBatch) -> bool:
        """Return whether new rows travel while other work of the step runs."""
        return self.group.in_background and not batch.shards.is_replicated


class StepContext(AttentionContext, ABC):
    """Context of one step on one rank.

    Every rank of the CP group makes the same calls in a step, even a rank without tokens.
    """

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        assert batch.page_size == pool.page_size, f"page sizes {batch.page_size} and {pool.page_size} differ"
        self.batch, self.pool, self.backend, self.exchange = batch, pool, backend, exchange
        self.query_rows, shape = batch.query_rows, batch.shape
        self.lens, self.last_layer_lens = (
            lens if len(lens) > 1 else None for lens in (shape.shard_lens, shape.last_layer_lens)
        )
        self.kv_first = exchange.overlaps(batch) or batch.query_rows is not None
        self.selection: Tensor | None = None
        """Keys that the latest layer with an indexer has selected, int32 ``[num_selecting, top_k]``."""

    @property
    def last_layer(self) -> "StepContext":
        return self if self._narrowed is None else self._narrowed

    @cached_property
    def _narrowed(self) -> "StepContext | None":
        """Context of the last layer if it has fewer queries, made when the layers before it have run.

        Neither context refers to itself or back: in a cycle, a step's tensors would wait for the garbage collector.
        """
        batch = self.batch.narrowed()
        if batch is self.batch:
            return None
        narrowed = type(self)(batch, self.pool, self.backend, self.exchange)
        narrowed.selection = None if self.selection is None else self.selection[batch.query_rows]
        return narrowed

    @cached_property
    def work(self) -> AttentionWork:
        return work_of(self.batch.runs, self.batch)

    @property
    def most_keys(self) -> int:
        return self.batch.shards.most_keys

    @property
    def num_selecting(self) -> int:
        """Return the number of queries for which this rank selects keys."""
        return sum(run.count for run in self.batch.runs)

    def attend(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None = None) -> Tensor:
        sees_all = params.window is None or not self.batch.is_sharded
        assert sees_all, "a window needs all pages of a request on every rank"
        joined = merge_in_turn(self.partials(layer, q, params, expand))
        self.pool.note_stored(layer)
        # Without queries, there may be no partials.
        if joined is None:
            *_, values = params.key_and_value(self.pool.layer_view(layer))
            return q.new_empty(0, q.shape[1], params.value_dim or values.shape[-1])
        return with_sinks(joined, params.sinks).out.to(q.dtype)

    @abstractmethod
    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterable[Partial]:
        """Store the new KV and yield causal attention of ``q [queries, heads, dim]`` over all keys, in parts."""

    def attend_selected(
        self, layer: int, q: Tensor, params: AttentionParams, index: IndexQueries | None, top_k: int
    ) -> Tensor:
        joined = merge_in_turn(self.selected_partials(layer, q, params, index, top_k))
        self.pool.note_stored(layer)
        assert joined is not None, "every context yields a partial"
        return joined.out.to(q.dtype)

    @abstractmethod
    def selected_partials(
        self, layer: int, q: Tensor, params: AttentionParams, index: IndexQueries | None, top_k: int
    ) -> Iterable[Partial]:
        """Store the new KV and yield attention over selected keys, in parts. See ``AttentionContext``."""

    def selected(
        self,
        keys: SelectableKeys,
        index: IndexQueries | None,
        index_pages: Tensor,
        top_k: int,
    ) -> Tensor:
        """Return what ``keys.select`` returns, or the previous selection if ``index`` is None."""
        if index is not None:
            self.selection = None  # so that only one selection exists
            self.selection = keys.select(index, index_pages, top_k)
        assert self.selection is not None, "a layer before has an indexer"
        return self.selection

    def gather_sampled(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all R sampled queries, ``[R, hidden]``, on every rank, given each rank's own."""
        batch = self.batch
        if batch.shards.is_replicated and len(batch.sampled) == len(hidden):
            return hidden
        mine = hidden if batch.query_rows is not None else hidden[batch.sampled_rows]
        if batch.shards.is_replicated:
            return mine
        counts: Counter[int] = Counter()
        indices = []
        for sample in batch.sampled:
            cp_rank = sample.location.cp_rank
            indices.append((cp_rank, counts[cp_rank]))
            counts[cp_rank] += 1
        most = max(counts.values(), default=0)
        gathered = gather_rows(self.exchange.group, mine, most)
        return gathered[device_of(gathered).put_index([cp_rank * most + index for cp_rank, index in indices])]

    def row_keys(self, key_runs: Sequence[Run]) -> RowKeys | None:
        """Return rows of keys for this rank's queries. Return None if no query sees any of them."""
        runs = self.batch.runs
        return RowKeys(self.backend, runs, key_runs) if sees_any(runs, key_runs) else None

    def keys_by_rank(self, ranks: Iterable[int]) -> list[tuple[int, RowKeys]]:
        """Return the new rows of those ranks whose keys a query of this rank sees."""
        keys = ((rank, self.row_keys(self.batch.shards.runs[rank])) for rank in ranks)
        return [(rank, rows) for rank, rows in keys if rows is not None]

    def prefix_keys(self) -> list[PrefixKeys]:
        """Return the cached keys by lifetime. Empty if no request has any."""
        batch, lens = self.batch, self.batch.shards.prefix_lens
        pages = batch.pages if any(lens) else ()
        return [PrefixKeys(self.backend, batch.runs, each, batch.page_size, lens) for each in pages]


def work_of(runs: Sequence[Run], batch: StepBatch) -> AttentionWork:
    """Return the size of attention of queries in ``runs`` to all keys of their requests."""
    return AttentionWork(
        num_queries=sum(run.count for run in runs),
        num_keys=batch.shards.num_keys(runs),
        num_pairs=sum(run.num_pairs for run in runs),
    )
