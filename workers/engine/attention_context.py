"""Attention contexts of gather mode and ring mode, and the choice between them.

A context is the engine side of attention during one step. Layers pass Q, K and V and get the attention output, and do
not know about context parallelism. In gather mode, every rank stores the K and V of all ranks. If rows travel in the
background, the context meanwhile attends to local keys. Otherwise, it makes one call over all keys, which is faster
than one call per rank.

If a layer expands keys, every context attends to the prefix and to each rank's new rows in turn, because only these can
be expanded a tile at a time.

In ring mode, each rank stores the new rows that it owns. With pass-KV, each rank's keys circulate, including cached
keys. With pass-Q, queries go to every rank, which returns partials over its part of the prefix.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from cluster.spec.strategy import Passing
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial, empty_partial, merge, merge_in_turn
from workers.attention.runs import RankRuns, Run, sees_any
from workers.context_parallel.cost_model import attended_pairs
from workers.context_parallel.exchange import HomewardPartials, PendingGather, Ring, RowGather, gather_rows
from workers.device import device_of
from workers.engine.batch import StepBatch
from workers.engine.step_keys import PrefixKeys, RowKeys, read_prefixes
from workers.kernels.elementwise import KvSlots
from workers.layers.attention import AttentionContext, AttentionWork, Expand
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

    @cached_property
    def work(self) -> AttentionWork:
        return work_of(self.batch.runs, self.batch)

    def attend(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None = None) -> Tensor:
        sees_all = params.window is None or not self.batch.is_sharded
        assert sees_all, "a window needs all pages of a request on every rank"
        found = self.partials(layer, q, params, expand)
        if expand is None:
            partials = list(found)
        else:
            joined = merge_in_turn(found)
            partials = [] if joined is None else [joined]
        self.pool.note_stored(layer)
        # Without queries, there may be no partials.
        if not len(q):
            *_, values = params.key_and_value(self.pool.layer_view(layer))
            return q.new_empty(0, q.shape[1], params.value_dim or values.shape[-1])
        return merge(partials, params.sinks).out.to(q.dtype)

    @abstractmethod
    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterable[Partial]:
        """Store the new KV and yield causal attention of ``q [queries, heads, dim]`` over all keys, in parts."""

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
    shards, asking = batch.shards, {run.request for run in runs}
    return AttentionWork(
        num_queries=sum(run.count for run in runs),
        num_keys=sum(shards.prefix_lens[request] + shards.extend_lens[request] for request in asking),
        num_pairs=sum(attended_pairs(run) for run in runs),
    )


class OwnedRows:
    """Rows that a given rank computes and this rank stores, in every layer."""

    def __init__(self, batch: StepBatch, pool: PagePool, cp_rank: int) -> None:
        self._pool = pool
        self._rows, self._slots = batch.owned_rows(cp_rank, pool.null_slot)

    def store(self, layer: int, kv: Tensor) -> None:
        """Store this object's rows of ``kv [tokens, heads, width]``, the rows of the rank that computed them."""
        if len(self._rows):
            self._pool.write(layer, self._slots, kv[self._rows])


class PagedContext(StepContext):
    """Context that stores all ranks' rows and then attends to all keys in one call, unless a layer expands them."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        self._attention = [backend.prepare(batch.runs, pages.tables, batch.page_size) for pages in batch.pages]
        self._gathered: PendingGather | None = None

    @cached_property
    def _expanded(self) -> tuple[list[PrefixKeys], list[tuple[int, RowKeys]]]:
        """Cached keys by lifetime, and new keys by rank."""
        shards = self.batch.shards
        return self.prefix_keys(), self.keys_by_rank(range(1 if shards.is_replicated else shards.cp))

    def kv_slots(self, layer: int) -> KvSlots | None:
        slots = self.batch.pages[self.pool.lifetime_of(layer)].slots
        return self.pool.kv_slots(layer, slots) if self.batch.shards.is_replicated else None

    def put(self, layer: int, *parts: Tensor) -> None:  # noqa: ARG002
        self._gathered = self.exchange.kv_gather.start(self.batch.shards, *parts)

    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterator[Partial]:
        lifetime, gathered, self._gathered = self.pool.lifetime_of(layer), self._gathered, None
        if gathered is not None:
            self.pool.write(layer, self.batch.pages[lifetime].slots, gathered.wait())
        if expand is None:
            yield self._attention[lifetime].attend(q, *params.key_and_value(self.pool.layer_view(layer)), params)
            return
        assert gathered is not None, "a layer that expands keys puts them"
        prefixes, by_rank = self._expanded
        if prefixes:
            yield from prefixes[lifetime].attend(q, layer, self.pool, params, expand)
        for rank, rows in by_rank:
            yield from rows.attend(q, self.pool.split(layer, gathered.of_rank(rank)), params, expand)


class OverlappedContext(StepContext):
    """Context that attends to the cached prefix and to this rank's rows while the other ranks' rows are in flight."""

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        self._prefix = self.prefix_keys()
        self._own = self.row_keys(batch.shards.runs[batch.cp_rank])
        self._others = self.keys_by_rank(rank for rank in range(batch.shards.cp) if rank != batch.cp_rank)

    def put(self, layer: int, *parts: Tensor) -> None:  # noqa: ARG002
        self._parts = parts
        self._gathered = self.exchange.kv_gather.start(self.batch.shards, *parts)

    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterator[Partial]:
        lifetime = self.pool.lifetime_of(layer)
        if self._prefix:
            yield from self._prefix[lifetime].attend(q, layer, self.pool, params, expand)
        if self._own is not None:
            yield from self._own.attend(q, self._parts, params, expand)
        self.pool.write(layer, self.batch.pages[lifetime].slots, self._gathered.wait())
        for rank, rows in self._others:
            yield from rows.attend(q, self.pool.split(layer, self._gathered.of_rank(rank)), params, expand)


class PassKvContext(StepContext):
    """Context that passes blocks from rank to rank. A block holds a rank's prefix rows and new rows.

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
        self._rows = [self.row_keys(self._key_runs(source)) for source in range(shards.cp)]
        sources = [rank] if shards.is_replicated else range(shards.cp)
        self._owned = {source: OwnedRows(batch, pool, source) for source in sources}

    def put(self, layer: int, *parts: Tensor) -> None:
        rank, ring = self.batch.cp_rank, self.exchange.ring
        prefix_len = self._prefix_lens[rank]
        num_rows = prefix_len + len(parts[0])
        block = ring.own(num_rows + self.batch.page_size, self._lens, self.pool.row_shape(layer), parts[0])
        self._block = block[:num_rows]
        read_prefixes(self.pool, layer, self._prefix_pages, block)
        torch.cat(parts, dim=-1, out=self._block[prefix_len:])
        ring.start()

    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterator[Partial]:
        for source, block in chain([(self.batch.cp_rank, self._block)], self.exchange.ring.others()):
            if source in self._owned:
                self._owned[source].store(layer, block[self._prefix_lens[source] :])
            rows = self._rows[source]
            if rows is not None:
                yield from rows.attend(q, self.pool.split(layer, block), params, expand)

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
        self._prefix = PrefixKeys(backend, everything, batch.pages[0], batch.page_size, batch.own_prefix_lens)
        device = device_of(batch.token_ids)
        self._inverse = device.put(torch.from_numpy(shards.inverse))
        self._homes = [device.put(torch.from_numpy(shards.local(rank))) for rank in range(shards.cp)]
        self._own = self.row_keys(batch.runs)
        self._own_stored = OwnedRows(batch, pool, batch.cp_rank)
        others = [] if shards.is_replicated else [rank for rank in range(shards.cp) if rank != batch.cp_rank]
        self._others = [(rank, self.row_keys(shards.runs[rank]), OwnedRows(batch, pool, rank)) for rank in others]

    @cached_property
    def last_layer(self) -> StepContext:
        return self  # the last layer's queries are few and sharded like its keys

    @cached_property
    def work(self) -> AttentionWork:
        """Return an average over the ranks, which must agree on the width of the queries that they pass."""
        ranks = self.batch.shards.runs[: 1 if self.batch.shards.is_replicated else None]
        whole = work_of(list(chain.from_iterable(ranks)), self.batch)
        return AttentionWork(whole.num_queries // len(ranks), whole.num_keys, whole.num_pairs // len(ranks))

    def put(self, layer: int, *parts: Tensor) -> None:  # noqa: ARG002
        self._parts = parts
        self._gathered = self.exchange.kv_gather.start(self.batch.shards, *parts)

    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterator[Partial]:
        queries = self.exchange.query_gather.start(self.batch.shards, q) if self._has_prefix else None
        if self._own is not None:
            yield from self._own.attend(q, self._parts, params, expand)
        self._gathered.wait()
        homeward = None
        if queries is not None:
            every_query = queries.wait()[self._inverse]
            found = merge_in_turn(self._prefix.attend(every_query, layer, self.pool, params, expand))
            if found is None:
                found = empty_partial(every_query, params.value_dim)
            homeward = HomewardPartials(self.exchange.group, found, self._homes)
        self._own_stored.store(layer, self._gathered.of_rank(self.batch.cp_rank))
        for rank, rows, owned in self._others:
            kv = self._gathered.of_rank(rank)
            owned.store(layer, kv)
            if rows is not None:
                yield from rows.attend(q, self.pool.split(layer, kv), params, expand)
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
