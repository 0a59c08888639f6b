"""Gather mode: every rank stores the K and V of all ranks.

If rows travel in the background, local keys are attended meanwhile. Otherwise there is nothing to hide, and one call
over all keys is faster than one per rank.
"""

from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams
from workers.context_parallel.gather import Gathered
from workers.engine.attention_context import CpExchange, StepContext
from workers.engine.batch import StepBatch
from workers.kernels.elementwise import KvSlots
from workers.memory.page_pool import PagePool


class PagedContext(StepContext):
    """Context that stores the rows of all ranks, then attends all keys in the pages at once."""

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
    """Context that attends the cached prefix and this rank's own rows while the others' are in flight."""

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
