"""Attention contexts of ring mode, in which each rank stores the new rows that it owns, and the choice of a context.

With pass-KV, each rank's keys circulate, including cached keys. With pass-Q, queries go to every rank, which returns
partials over its part of the prefix.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from cluster.spec.strategy import Passing
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial
from workers.attention.runs import RankRuns, Run
from workers.context_parallel.exchange import HomewardPartials
from workers.device import device_of
from workers.engine.attention_context import CpExchange, OverlappedContext, OwnedRows, PagedContext, StepContext
from workers.engine.batch import StepBatch
from workers.memory.page_pool import PagePool


class PassKvContext(StepContext):
    """Context that passes blocks from rank to rank. A block is a rank's part of each request's prefix and its new rows.

    If every rank computes every token, only prefixes circulate.
    """

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        shards, rank = batch.shards, batch.cp_rank
        self._prefix_lens = [sum(lens) for lens in batch.prefix_lens_by_owner]
        self._lens = [
            prefix_len + (0 if shards.is_replicated else new_len)
            for prefix_len, new_len in zip(self._prefix_lens, shards.lens, strict=True)
        ]
        self._prefix_pages = [
            (table[: pages_for(length, batch.page_size)], length)
            for table, length in zip(batch.pages[0].tables, batch.own_prefix_lens, strict=True)
            if length
        ]
        self._rows = [self.prepare_rows(self._key_runs(source)) for source in range(shards.cp)]
        sources = [rank] if shards.is_replicated else range(shards.cp)
        self._owned = {source: OwnedRows(batch, pool, source) for source in sources}

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        rank, ring = self.batch.cp_rank, self.exchange.ring
        prefix_len = self._prefix_lens[rank]
        num_rows = prefix_len + len(k)
        block = ring.own(num_rows + self.batch.page_size, self._lens, (k.shape[1], sum(self.pool.widths(layer))), k)
        self._block = block[:num_rows]
        self._read_prefix(layer, block)
        torch.cat((k, v), dim=-1, out=self._block[prefix_len:])
        ring.start()

    def _read_prefix(self, layer: int, block: Tensor) -> None:
        """Read each prefix in full pages, which is faster. Later rows of the block overwrite the surplus."""
        begin = 0
        for pages, length in self._prefix_pages:
            self.pool.read_pages(layer, pages, block[begin : begin + len(pages) * self.batch.page_size])
            begin += length

    def partials(self, layer: int, q: Tensor, params: AttentionParams) -> Iterator[Partial]:
        for source, block in chain([(self.batch.cp_rank, self._block)], self.exchange.ring.others()):
            if source in self._owned:
                self._owned[source].store(layer, block[self._prefix_lens[source] :])
            rows = self._rows[source]
            if rows is not None:
                yield rows.attend(q, *self.pool.split(layer, block), params)

    def _key_runs(self, source: int) -> RankRuns:
        """Return the runs of the keys in a rank's block. All prefixes precede the new tokens."""
        shards = self.batch.shards
        lens = self.batch.prefix_lens_by_owner[source]
        prefixes = tuple(Run(request, 0, length, 1) for request, length in enumerate(lens) if length)
        is_passed = source == self.batch.cp_rank or not shards.is_replicated
        return prefixes + shards.runs[source] if is_passed else prefixes


class PassQContext(StepContext):
    """Context that gathers new K and V, as in gather mode, and passes queries over the prefix."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        shards = batch.shards
        everything = [
            Run(request, prefix_len, extend_len, 1)
            for request, (prefix_len, extend_len) in enumerate(zip(shards.prefix_lens, shards.extend_lens, strict=True))
        ]
        self._has_prefix = any(shards.prefix_lens)
        self._prefix = backend.prepare(everything, batch.pages[0].tables, batch.page_size, batch.own_prefix_lens)
        device = device_of(batch.token_ids)
        self._inverse = device.put(torch.from_numpy(shards.inverse))
        self._homes = [device.put(torch.from_numpy(shards.local(rank))) for rank in range(shards.cp)]
        self._own = self.prepare_rows(batch.runs)
        self._own_stored = OwnedRows(batch, pool, batch.cp_rank)
        others = [] if shards.is_replicated else [rank for rank in range(shards.cp) if rank != batch.cp_rank]
        self._others = [(rank, self.prepare_rows(shards.runs[rank]), OwnedRows(batch, pool, rank)) for rank in others]

    @cached_property
    def last_layer(self) -> StepContext:
        return self  # the last layer's queries are few and sharded like its keys

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002
        self._k, self._v = k, v
        self._gathered = self.exchange.kv_gather.start(self.batch.shards, k, v)

    def partials(self, layer: int, q: Tensor, params: AttentionParams) -> Iterator[Partial]:
        queries = self.exchange.query_gather.start(self.batch.shards, q) if self._has_prefix else None
        if self._own is not None:
            yield self._own.attend(q, self._k, self._v, params)
        self._gathered.wait()
        homeward = None
        if queries is not None:
            every_query = queries.wait()[self._inverse]
            found = self._prefix.attend(every_query, *self.pool.layer_view(layer), params)
            homeward = HomewardPartials(self.exchange.group, found, self._homes)
        self._own_stored.store(layer, self._gathered.of_rank(self.batch.cp_rank))
        for rank, rows, owned in self._others:
            kv = self._gathered.of_rank(rank)
            owned.store(layer, kv)
            if rows is not None:
                yield rows.attend(q, *self.pool.split(layer, kv), params)
        if homeward is not None:
            yield from homeward.wait()


def make_context(batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> StepContext:
    kind: type[StepContext]
    if batch.is_sharded:
        kind = PassQContext if batch.shape.passing is Passing.PASS_Q else PassKvContext
    else:
        is_hidden = exchange.group.in_background and not batch.shards.is_replicated
        kind = OverlappedContext if is_hidden else PagedContext
    return kind(batch, pool, backend, exchange)
