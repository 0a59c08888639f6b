"""Attention contexts of gather mode, in which every rank stores the K and V of all ranks.

A context is the engine side of attention during one step. Layers pass Q, K and V and get the attention output, and do
not know about context parallelism. If rows travel in the background, the context meanwhile attends to local keys.
Otherwise, it makes one call over all keys, which is faster than one call per rank.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams, RowAttention
from workers.attention.merge import Partial, merge
from workers.attention.runs import Run, sees_any
from workers.context_parallel.exchange import PendingGather, Ring, RowGather, gather_rows
from workers.device import device_of
from workers.engine.batch import StepBatch
from workers.kernels.elementwise import KvSlots
from workers.layers.attention import AttentionContext
from workers.memory.page_pool import PagePool
from workers.parallel.collectives import Communicator


class CpExchange:
    """Row exchanges in a CP group, and their buffers. One per worker."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self.kv_gather = RowGather(group)
        self.query_gather = RowGather(group)
        self.ring = Ring(group)


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
        is_hidden = exchange.group.in_background and not batch.shards.is_replicated
        self.kv_first = is_hidden or batch.query_rows is not None

    @cached_property
    def last_layer(self) -> "StepContext":
        batch = self.batch.narrowed()
        return self if batch is self.batch else type(self)(batch, self.pool, self.backend, self.exchange)

    def attend(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        sees_all = params.window is None or not self.batch.is_sharded
        assert sees_all, "a window needs all pages of a request on every rank"
        partials = list(self.partials(layer, q, params))
        self.pool.note_stored(layer)
        # Without queries, there may be no partials.
        return merge(partials, params.sinks).out if len(q) else q.new_empty(0, q.shape[1], self.pool.widths(layer)[1])

    @abstractmethod
    def partials(self, layer: int, q: Tensor, params: AttentionParams) -> Iterable[Partial]:
        """Store the new KV and yield causal attention of ``q [queries, heads, dim]`` over all keys, in parts."""

    def gather_sampled(self, hidden: Tensor) -> Tensor:
        """Return the hidden state of every sampled query, ``[R, hidden]``, on every rank, given this rank's own."""
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

    def prepare_rows(self, key_runs: Sequence[Run]) -> RowAttention | None:
        """Prepare attention of this rank's queries over rows of keys. Return None if no query sees any of them."""
        runs = self.batch.runs
        return self.backend.prepare_rows(runs, key_runs) if sees_any(runs, key_runs) else None


class OwnedRows:
    """Rows that one rank computes and this rank stores, in every layer."""

    def __init__(self, batch: StepBatch, pool: PagePool, cp_rank: int) -> None:
        self._pool = pool
        self._rows, self._slots = batch.owned_rows(cp_rank, pool.null_slot)

    def store(self, layer: int, kv: Tensor) -> None:
        """Store ``kv [tokens, heads, width]``, the rows of the rank that computed them."""
        if len(self._rows):
            self._pool.write(layer, self._slots, kv[self._rows])


class PagedContext(StepContext):
    """Context that stores all ranks' rows and then attends to all keys in one call."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        self._attention = [backend.prepare(batch.runs, pages.tables, batch.page_size) for pages in batch.pages]
        self._gathered: PendingGather | None = None

    def kv_slots(self, layer: int) -> KvSlots | None:
        slots = self.batch.pages[self.pool.lifetime_of(layer)].slots
        return self.pool.kv_slots(layer, slots) if self.batch.shards.is_replicated else None

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002
        self._gathered = self.exchange.kv_gather.start(self.batch.shards, k, v)

    def partials(self, layer: int, q: Tensor, params: AttentionParams) -> Iterator[Partial]:
        lifetime = self.pool.lifetime_of(layer)
        if self._gathered is not None:
            self.pool.write(layer, self.batch.pages[lifetime].slots, self._gathered.wait())
            self._gathered = None
        yield self._attention[lifetime].attend(q, *self.pool.layer_view(layer), params)


class OverlappedContext(StepContext):
    """Context that attends to the cached prefix and to this rank's rows while the other ranks' rows are in flight."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        shards = batch.shards
        self._prefix = [
            backend.prepare(batch.runs, pages.tables, batch.page_size, shards.prefix_lens)
            for pages in (batch.pages if any(shards.prefix_lens) else ())
        ]
        self._own = self.prepare_rows(shards.runs[batch.cp_rank])
        others = ((rank, self.prepare_rows(shards.runs[rank])) for rank in range(shards.cp) if rank != batch.cp_rank)
        self._others = [(rank, rows) for rank, rows in others if rows is not None]

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002
        self._k, self._v = k, v
        self._gathered = self.exchange.kv_gather.start(self.batch.shards, k, v)

    def partials(self, layer: int, q: Tensor, params: AttentionParams) -> Iterator[Partial]:
        lifetime = self.pool.lifetime_of(layer)
        if self._prefix:
            yield self._prefix[lifetime].attend(q, *self.pool.layer_view(layer), params)
        if self._own is not None:
            yield self._own.attend(q, self._k, self._v, params)
        self.pool.write(layer, self.batch.pages[lifetime].slots, self._gathered.wait())
        for rank, rows in self._others:
            yield rows.attend(q, *self.pool.split(layer, self._gathered.of_rank(rank)), params)
