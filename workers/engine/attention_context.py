"""Engine side of attention during one step. Layers pass Q, K and V and get the attention output, unaware of CP.

In gather mode every rank stores the K and V of all ranks. If rows travel in the background, local keys are attended
meanwhile. Otherwise there is nothing to hide, and one call over all keys is faster than one per rank.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams, RowAttention
from workers.attention.merge import Partial, merge
from workers.attention.runs import Run, sees_any
from workers.context_parallel.exchange import Gathered, Ring, RowGather, gather_rows
from workers.device import index_on
from workers.engine.batch import StepBatch
from workers.kernels.elementwise import KvSlots
from workers.memory.page_pool import PagePool
from workers.parallel.collectives import Communicator


class CpExchange:
    """Row exchanges between the ranks of a CP group, and their buffers. Each worker has one."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self.kv_gather = RowGather(group)
        self.query_gather = RowGather(group)
        self.ring = Ring(group)


class StepContext(ABC):
    """Implementation of workers.layers.attention.AttentionContext for one step on one rank.

    Every rank of the CP group makes the same calls for the same step, even one without tokens.
    """

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        assert batch.page_size == pool.page_size, f"pages of {batch.page_size} and of {pool.page_size} tokens"
        self.batch, self.pool, self.backend, self.exchange = batch, pool, backend, exchange
        self.counted: Tensor | None = None
        self.wanted, shape = batch.wanted, batch.shape
        self.lens, self.last_lens = (
            lens if len(lens) > 1 else None for lens in (shape.shard_lens, shape.last_shard_lens)
        )
        is_hidden = exchange.group.in_background and not batch.plan.replicated
        self.kv_first = is_hidden or batch.wanted is not None

    @cached_property
    def last(self) -> "StepContext":
        batch = self.batch.narrowed()
        return self if batch is self.batch else type(self)(batch, self.pool, self.backend, self.exchange)

    def kv_slots(self, layer: int) -> KvSlots | None:  # noqa: ARG002
        return None

    @abstractmethod
    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Start exchanging this rank's ``k`` and ``v [tokens, kv_heads, dim]`` over the group."""

    def attend(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        sees_all = params.window is None or not self.batch.is_sharded
        assert sees_all, "a window needs all pages of a request on every rank"
        out = self.attend_storing(layer, q, params)
        self.pool.note_stored(layer)
        return out if len(q) else q.new_empty(0, q.shape[1], self.pool.widths(layer)[1])

    @abstractmethod
    def attend_storing(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        """Return causal attention of ``q [wanted, heads, dim]`` over cached prefix and new tokens, and store the new
        KV.
        """

    def join_last(self, hidden: Tensor) -> Tensor:
        """Return the last token's hidden state of every sampled request, ``[R, hidden]``, on every rank. ``hidden`` is
        local.
        """
        batch = self.batch
        if batch.plan.replicated and len(batch.sampled) == len(hidden):
            return hidden
        mine = hidden if batch.wanted is not None else hidden[batch.sampled_rows]
        if batch.plan.replicated:
            return mine
        counts: Counter[int] = Counter()
        indices = []
        for sample in batch.sampled:
            cp_rank = sample.location.cp_rank
            indices.append((cp_rank, counts[cp_rank]))
            counts[cp_rank] += 1
        most = max(counts.values(), default=0)
        gathered = gather_rows(self.exchange.group, mine, most)
        return gathered[index_on([cp_rank * most + index for cp_rank, index in indices], gathered.device)]

    def prepare_rows(self, key_runs: Sequence[Run]) -> RowAttention | None:
        """Prepare this rank's queries over rows of keys; None if no query sees any of them."""
        runs = self.batch.runs
        return self.backend.prepare_rows(runs, key_runs) if sees_any(runs, key_runs) else None

    def joined(self, q: Tensor, partials: Sequence[Partial], params: AttentionParams) -> Tensor:
        """Join all partials of this rank's queries. Without queries there may be no partials, and the result is
        arbitrary.
        """
        return merge(partials, params.sinks).out if len(q) else q

    def owned_rows(self, cp_rank: int) -> "OwnedRows":
        """Return the rows computed by a rank that belong in this rank's pages."""
        return OwnedRows(self.pool, *self.batch.owned_rows(cp_rank, self.pool.null_slot))


class OwnedRows:
    """Rows that one rank computes and this rank stores, in every layer."""

    def __init__(self, pool: PagePool, rows: Tensor, slots: Tensor) -> None:
        self._rows, self._slots = rows, pool.at_slots(slots)

    def store(self, layer: int, kv: Tensor) -> None:
        """Store ``kv [tokens, heads, width]``, with the tokens of the rank that computed them."""
        if len(self._rows):
            self._slots.write(layer, kv[self._rows])


class PagedContext(StepContext):
    """Context that first stores the rows of all ranks, then attends to all keys in one call."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        self._attention = [backend.prepare(batch.runs, pages.tables, batch.page_size) for pages in batch.pages]
        self._slots = [pool.at_slots(pages.slots) for pages in batch.pages]
        self._gathered: Gathered | None = None

    def kv_slots(self, layer: int) -> KvSlots | None:
        """Return slots as StepContext does; None if other ranks need the new rows too."""
        slots = self.batch.pages[self.pool.lifetime_of(layer)].slots
        return self.pool.kv_slots(layer, slots) if self.batch.plan.replicated else None

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002
        self._gathered = self.exchange.kv_gather.start(self.batch.plan, k, v)

    def attend_storing(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        lifetime = self.pool.lifetime_of(layer)
        if self._gathered is not None:
            self._slots[lifetime].write(layer, self._gathered.wait())
            self._gathered = None
        return self.joined(q, [self._attention[lifetime].attend(q, *self.pool.layer_view(layer), params)], params)


class OverlappedContext(StepContext):
    """Context that attends to the cached prefix and this rank's own rows while the other ranks' rows are in flight."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        plan = batch.plan
        self._slots = [pool.at_slots(pages.slots) for pages in batch.pages]
        self._prefix = [
            backend.prepare(batch.runs, pages.tables, batch.page_size, plan.prefix_lens)
            for pages in (batch.pages if any(plan.prefix_lens) else ())
        ]
        self._own = self.prepare_rows(plan.runs[batch.cp_rank])
        others = ((rank, self.prepare_rows(plan.runs[rank])) for rank in range(plan.cp) if rank != batch.cp_rank)
        self._others = [(rank, rows) for rank, rows in others if rows is not None]

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002
        self._k, self._v = k, v
        self._gathered = self.exchange.kv_gather.start(self.batch.plan, k, v)

    def attend_storing(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        partials, lifetime = [], self.pool.lifetime_of(layer)
        if self._prefix:
            partials.append(self._prefix[lifetime].attend(q, *self.pool.layer_view(layer), params))
        if self._own is not None:
            partials.append(self._own.attend(q, self._k, self._v, params))
        self._slots[lifetime].write(layer, self._gathered.wait())
        for rank, rows in self._others:
            kv = self._gathered.of_rank(rank)
            partials.append(rows.attend(q, *self.pool.split(layer, kv), params))
        return self.joined(q, partials, params)
