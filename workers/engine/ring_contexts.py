"""Attention contexts of ring mode, in which each rank stores the new rows that it owns.

With pass-KV, each rank's keys circulate, including cached keys. With pass-Q, queries go to every rank, which returns
partials over its part of the prefix.
"""

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial, empty_partial, merge_in_turn
from workers.attention.runs import RankRuns, Run
from workers.attention.selection import NO_KEY, Chosen, IndexQueries, are_among_best
from workers.context_parallel.exchange import HomewardPartials
from workers.context_parallel.shard_plan import whole_runs
from workers.device import device_of
from workers.engine.batch import StepBatch
from workers.engine.joined_blocks import JoinedBlocks
from workers.engine.selected_keys import SelectableKeys
from workers.engine.step_context import CpExchange, StepContext, work_of
from workers.engine.step_keys import PrefixKeys, read_prefixes
from workers.layers.attention import AttentionWork, Expand
from workers.memory.page_pool import PagePool
from workers.parallel.communicator import Communicator
from workers.parallel.exchanges import gather_rows


class OwnedRows:
    """Rows that a given rank computes and this rank stores, in every layer."""

    def __init__(self, batch: StepBatch, pool: PagePool, cp_rank: int) -> None:
        self._pool = pool
        self._rows, self._slots = batch.owned_rows(cp_rank, pool.null_slot)

    def store(self, layer: int, kv: Tensor) -> None:
        """Store this object's rows of ``kv [tokens, heads, width]``, the rows of the rank that computed them."""
        if len(self._rows):
            self._pool.write(layer, self._slots, kv.index_select(0, self._rows))


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
        for source, block in self._blocks(layer):
            rows = self._rows[source]
            if rows is not None:
                yield from rows.attend(q, self.pool.split(layer, block), params, expand)

    def selected_partials(
        self, layer: int, q: Tensor, params: AttentionParams, index: IndexQueries | None, top_k: int
    ) -> Iterator[Partial]:
        keys, slots = self._joined.keys, self._joined.slots
        rows = self._block.new_empty(self._joined.num_slots, *self.pool.row_shape(layer))
        for source, block in self._blocks(layer):
            rows.index_copy_(0, slots[source], block)
        pages = rows.view(-1, self.batch.page_size, *rows.shape[1:]).transpose(1, 2)
        parts = self.pool.split(layer, pages)
        yield keys.attend(q, parts[0], self.selected(keys, index, parts[-1], top_k), params)

    def _blocks(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's block, this rank's first, and store the rows that this rank owns."""
        for source, block in chain([(self.batch.cp_rank, self._block)], self.exchange.ring.others()):
            if source in self._owned:
                self._owned[source].store(layer, block[self._prefix_lens[source] :])
            yield source, block

    @cached_property
    def _joined(self) -> JoinedBlocks:
        return JoinedBlocks(
            self.backend, self.batch, [self._key_runs(source) for source in range(self.batch.shards.cp)]
        )

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
        self._everything = everything = whole_runs(shards.extend_lens, shards.prefix_lens)
        self._has_prefix = any(shards.prefix_lens)
        self._prefix = PrefixKeys(backend, everything, batch.pages[0], batch.page_size, batch.own_prefix_lens)
        device = device_of(batch.token_ids)
        self._inverse = device.put(torch.from_numpy(shards.inverse))
        self._homes = [device.put(torch.from_numpy(shards.local(rank))) for rank in range(shards.cp)]
        self._own = self.row_keys(batch.runs)
        self._own_stored = OwnedRows(batch, pool, batch.cp_rank)
        others = [] if shards.is_replicated else [rank for rank in range(shards.cp) if rank != batch.cp_rank]
        self._others = [(rank, self.row_keys(shards.runs[rank]), OwnedRows(batch, pool, rank)) for rank in others]

    @property
    def last_layer(self) -> StepContext:
        return self  # the last layer's queries are few and sharded like its keys

    @cached_property
    def work(self) -> AttentionWork:
        """Return an average over the ranks, which must agree on the width of the queries that they pass."""
        ranks = self.batch.shards.distinct_runs
        whole = work_of(list(chain.from_iterable(ranks)), self.batch)
        return AttentionWork(whole.num_queries // len(ranks), whole.num_keys, whole.num_pairs // len(ranks))

    @property
    def num_selecting(self) -> int:
        return self.batch.shards.num_tokens

    def put(self, layer: int, *parts: Tensor) -> None:  # noqa: ARG002
        self._parts = parts
        self._gathered = self.exchange.kv_gather.start(self.batch.shards, *parts)

    def partials(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None) -> Iterator[Partial]:
        queries = self.exchange.query_gather.start(self.batch.shards, q) if self._has_prefix else None
        if self._own is not None:
            yield from self._own.attend(q, self._parts, params, expand)
        self._wait_for_rows()
        homeward = None
        if queries is not None:
            found = self._of_prefix(queries.wait().index_select(0, self._inverse), layer, params, expand)
            homeward = HomewardPartials(self.exchange.group, found, self._homes)
            del found
        self._own_stored.store(layer, self._gathered.of_rank(self.batch.cp_rank))
        for rank, rows, owned in self._others:
            kv = self._gathered.of_rank(rank)
            owned.store(layer, kv)
            if rows is not None:
                yield from rows.attend(q, self.pool.split(layer, kv), params, expand)
        if homeward is not None:
            yield from homeward.wait()

    def _wait_for_rows(self) -> None:
        self._gathered.wait()
        self._parts = ()  # they are among the gathered rows

    def _of_prefix(self, q: Tensor, layer: int, params: AttentionParams, expand: Expand | None) -> Partial:
        """Return attention of all ranks' queries to this rank's part of the prefix."""
        found = merge_in_turn(self._prefix.attend(q, layer, self.pool, params, expand))
        return empty_partial(q, params.value_dim) if found is None else found

    def selected_partials(
        self, layer: int, q: Tensor, params: AttentionParams, index: IndexQueries | None, top_k: int
    ) -> Iterator[Partial]:
        """Yield the partials of all ranks. Each rank attends to those selected keys that are in its pages."""
        shards, exchange = self.batch.shards, self.exchange
        queries = exchange.query_gather.start(shards, q)
        of_index = None
        if index is not None:
            of_index = exchange.index_gather.start(shards, index.q.float(), index.weights[..., None])
        self._wait_for_rows()
        self._own_stored.store(layer, self._gathered.of_rank(self.batch.cp_rank))
        for rank, _, owned in self._others:
            owned.store(layer, self._gathered.of_rank(rank))
        parts = self.pool.layer_view(layer)
        every_index = None
        if of_index is not None:
            rows = of_index.wait().index_select(0, self._inverse)
            every_index = IndexQueries(rows[..., :-1], rows[..., -1])
            del rows
        selected = self.selected(self._selectable, every_index, parts[-1], top_k)
        del every_index
        found = self._selectable.attend(queries.wait().index_select(0, self._inverse), parts[0], selected, params)
        homeward = HomewardPartials(exchange.group, found, self._homes)
        del found
        yield from homeward.wait()

    @cached_property
    def _selectable(self) -> SelectableKeys:
        batch = self.batch
        owned, agree = batch.owned_by(batch.cp_rank), partial(_are_best, self.exchange.group)
        return SelectableKeys(self.backend, self._everything, batch.pages[0].tables, owned, agree)


def _are_best(group: Communicator, own: Chosen, top_k: int) -> Tensor:
    """Return which of this rank's best keys are among the best of all ranks. All ranks call this together."""
    num_queries, num_own = own.scores.shape
    scores = own.scores.new_full((num_queries, top_k), -torch.inf)
    positions = own.keys.new_full((num_queries, top_k), NO_KEY)
    scores[:, :num_own], positions[:, :num_own] = own
    gathered = (gather_rows(group, rows, num_queries) for rows in (scores, positions))
    everyone = (rows.view(-1, num_queries, top_k).transpose(0, 1).flatten(1) for rows in gathered)
    return are_among_best(own, Chosen(*everyone), top_k)
