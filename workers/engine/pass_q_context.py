"""Ring mode, pass-Q: queries go to every rank, and partials over that rank's part of the prefix come back."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.context_parallel.gather import HomewardPartials
from workers.device import on_device
from workers.engine.attention_context import CpExchange, StepContext
from workers.engine.batch import StepBatch
from workers.memory.page_pool import PagePool


class PassQContext(StepContext):
    """Context that gathers new K and V, few here, as in gather mode; each rank stores the ones it owns."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        plan = batch.plan
        everything = [
            Run(request, prefix_len, extend_len, 1)
            for request, (prefix_len, extend_len) in enumerate(zip(plan.prefix_lens, plan.extend_lens, strict=True))
        ]
        self._has_prefix = any(plan.prefix_lens)
        self._prefix = backend.prepare(everything, batch.pages[0].tables, batch.page_size, batch.prefix_share)
        device = batch.token_ids.device
        self._inverse = on_device(torch.from_numpy(plan.inverse), device)
        self._homes = [on_device(torch.from_numpy(plan.local(rank)), device) for rank in range(plan.cp)]
        self._own = self.prepare_rows(batch.runs)
        self._own_stored = self.owned_rows(batch.cp_rank)
        others = [] if plan.replicated else [rank for rank in range(plan.cp) if rank != batch.cp_rank]
        self._others = [(rank, self.prepare_rows(plan.runs[rank]), self.owned_rows(rank)) for rank in others]

    @cached_property
    def last(self) -> StepContext:
        """Return this context: its queries are few, and sharded like its keys."""
        return self

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002
        self._k, self._v = k, v
        self._gathered = self.exchange.kv_gather.start(self.batch.plan, k, v)

    def attend_storing(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        queries = self.exchange.query_gather.start(self.batch.plan, q) if self._has_prefix else None
        partials = [] if self._own is None else [self._own.attend(q, self._k, self._v, params)]
        self._gathered.wait()
        homeward = None
        if queries is not None:
            every_query = queries.wait()[self._inverse]
            found = self._prefix.attend(every_query, *self.pool.layer_view(layer), params)
            homeward = HomewardPartials(self.exchange.group, found, self._homes)
        partials += self._take_others(layer, q, params)
        if homeward is not None:
            partials += homeward.wait()
        return self.joined(q, partials, params)

    def _take_others(self, layer: int, q: Tensor, params: AttentionParams) -> Iterator[Partial]:
        """Store what this rank owns of all new rows, and attend the others' rows."""
        self._own_stored.store(layer, self._gathered.of_rank(self.batch.cp_rank))
        for rank, rows, owned in self._others:
            kv = self._gathered.of_rank(rank)
            owned.store(layer, kv)
            if rows is not None:
                yield rows.attend(q, *self.pool.split(layer, kv), params)
