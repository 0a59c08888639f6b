"""Attention contexts of gather mode, in which every rank stores the KV of all ranks.

If rows travel in the background, the context meanwhile attends to local keys. Otherwise, it makes one call over all
keys, which is faster than one call per rank. A layer that selects keys needs all of them first, so its attention begins
when all rows are stored.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial
from workers.attention.selection import IndexQueries
from workers.context_parallel.exchange import PendingGather, SharedRows
from workers.engine.batch import StepBatch
from workers.engine.selected_keys import SelectableKeys
from workers.engine.step_context import CpExchange, StepContext
from workers.engine.step_keys import PrefixKeys, RowKeys
from workers.kernels.elementwise import KvSlots
from workers.layers.attention import Expand
from workers.memory.page_pool import PagePool


class GatherContext(StepContext):
    """Context of a rank that stores all ranks' rows."""

    _gathered: PendingGather | None = None
    """Rows of the current layer, until they are stored."""

    @cached_property
    def _selectable(self) -> SelectableKeys:
        (pages,) = self.batch.pages
        return SelectableKeys(self.backend, self.batch.runs, pages.tables, self.batch.owned_by(0))

    def put(self, layer: int, *parts: Tensor) -> None:  # noqa: ARG002
        self._gathered = self.exchange.kv_gather.start(self.batch.shards, *parts)

    def selected_partials(
        self, layer: int, q: Tensor, params: AttentionParams, index: IndexQueries | None, top_k: int
    ) -> Iterator[Partial]:
        self.store(layer)
        parts = self.pool.layer_view(layer)
        selected = self.selected(self._selectable, index, parts[-1], top_k)
        yield self._selectable.attend(q, parts[0], selected, params)

    def store(self, layer: int) -> PendingGather | None:
        """Store and return all ranks' rows. Return None if a kernel has stored them."""
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            self.pool.write(layer, self._slots(layer), gathered.wait())
        return gathered

    def _slots(self, layer: int) -> Tensor:
        return self.batch.pages[self.pool.lifetime_of(layer)].slots


class PagedContext(GatherContext):
    """Context that stores all ranks' rows and then attends to all keys in one call, unless a layer expands them."""

    _shared: SharedRows | None = None
    """Rows of the current layer that a kernel writes, until they are stored."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        self._attention = [backend.prepare(batch.runs, pages.tables, batch.page_size) for pages in batch.pages]

    @cached_property
    def _expanded(self) -> tuple[list[PrefixKeys], list[tuple[int, RowKeys]]]:
        """Cached keys by lifetime, and new keys by rank."""
        return self.prefix_keys(), self.keys_by_rank(range(len(self.batch.shards.distinct_runs)))

    @cached_property
    def _own_rows(self) -> Tensor:
        return torch.arange(self.batch.shards.lens[self.batch.cp_rank])

    def kv_slots(self, layer: int) -> KvSlots | None:
        """Return slots in the pool or, if other ranks have rows, too, in memory that all ranks read."""
        slots, shards = self.pool.kv_slots(layer, self._slots(layer)), self.batch.shards
        if slots is None or shards.is_replicated:
            return slots
        num_heads, width = self.pool.row_shape(layer)
        dtype = slots.layer_pages.dtype
        self._shared = SharedRows.open(self.exchange.group, shards, (num_heads, width), dtype)
        if self._shared is None:
            return None
        pages_of_one = self._shared.own.view(-1, num_heads, 2, 1, width // 2)
        return KvSlots(pages_of_one, self._own_rows)

    def store(self, layer: int) -> PendingGather | None:
        shared, self._shared = self._shared, None
        if shared is None:
            return super().store(layer)
        for places, rows in shared.arriving():
            self.pool.write(layer, self._slots(layer)[places], rows)
        return None

    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterator[Partial]:
        lifetime, gathered = self.pool.lifetime_of(layer), self.store(layer)
        if expand is None:
            yield self._attention[lifetime].attend(q, *params.key_and_value(self.pool.layer_view(layer)), params)
            return
        assert gathered is not None, "a layer that expands keys puts them"
        prefixes, by_rank = self._expanded
        if prefixes:
            yield from prefixes[lifetime].attend(q, layer, self.pool, params, expand)
        for rank, rows in by_rank:
            yield from rows.attend(q, self.pool.split(layer, gathered.of_rank(rank)), params, expand)


class OverlappedContext(GatherContext):
    """Context that attends to the cached prefix and to this rank's rows while the other ranks' rows are in flight."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        self._prefix = self.prefix_keys()
        self._own = self.row_keys(batch.shards.runs[batch.cp_rank])
        self._others = self.keys_by_rank(rank for rank in range(batch.shards.cp) if rank != batch.cp_rank)

    def put(self, layer: int, *parts: Tensor) -> None:
        self._parts = parts
        super().put(layer, *parts)

    def store(self, layer: int) -> PendingGather | None:
        self._parts = ()  # they are among the gathered rows
        return super().store(layer)

    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterator[Partial]:
        lifetime = self.pool.lifetime_of(layer)
        if self._prefix:
            yield from self._prefix[lifetime].attend(q, layer, self.pool, params, expand)
        if self._own is not None:
            yield from self._own.attend(q, self._parts, params, expand)
        gathered = self.store(layer)
        assert gathered is not None, "no kernel stores rows in transit"
        for rank, rows in self._others:
            yield from rows.attend(q, self.pool.split(layer, gathered.of_rank(rank)), params, expand)
