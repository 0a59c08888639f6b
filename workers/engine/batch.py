"""One rank's batch in a step: tokens, positions, KV slots, and sampled requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.spec.step_messages import ScheduledRequest, StepShape
from workers.attention.runs import Run
from workers.context_parallel.shard_plan import Indices, ShardPlan, TokenLocation, plan_shards
from workers.device import Device, device_of
from workers.engine.step_state import PreviousTokens

_NO_PAGES = np.empty(0, dtype=np.int64)


class SampledQuery(NamedTuple):
    """Last token of a request in this step. The next token is sampled after it."""

    location: TokenLocation
    run: Run


class StepInput(NamedTuple):
    """Input of a step, the same on every rank of a CP group."""

    scheduled: Sequence[ScheduledRequest]
    page_tables: Sequence[Sequence[NDArray[np.int64]]]
    """Pages of prefix and new tokens by lifetime and request, in order of position. If a pool is divided among n
    owners, page p is page p // n of owner p % n.
    """
    shape: StepShape
    previous: PreviousTokens | None = None
    """Input tokens sampled by the previous step."""


class StepPages(NamedTuple):
    """Pages of one lifetime in a step, on one rank."""

    slots: Tensor
    """KV slots ``[gathered rows]`` int64. Padding and other owners' tokens go to the null slot."""
    slots_on_host: Indices
    tables: tuple[Tensor, ...]
    """Pages by request, int64, in order of position."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's share of a step's tokens."""

    shape: StepShape
    shards: ShardPlan
    cp_rank: int
    page_size: int
    token_ids: Tensor
    """``[tokens]`` int64, in this rank's order."""
    positions: Tensor
    """``[tokens]`` int64, each token's position in its request."""
    pages: tuple[StepPages, ...]
    """Pages by lifetime."""
    prefix_lens_by_owner: tuple[tuple[int, ...], ...]
    """Number of prefix tokens in each owner's pages, by owner and request."""
    sampled: tuple[SampledQuery, ...]
    """One query per sampled request, in batch order."""
    query_rows: Tensor | None = None
    """Rows of this rank's tokens that have queries, int64. None if all tokens have queries."""
    is_scored: bool = False
    """True if the final hidden states of all tokens are needed."""

    @property
    def runs(self) -> tuple[Run, ...]:
        if self.query_rows is None:
            return self.shards.runs[self.cp_rank]
        return tuple(query.run for query in self._own_sampled)

    def narrowed(self) -> "StepBatch":
        """Return a batch with queries for sampled tokens only, or this batch if all are sampled or scored."""
        if self.query_rows is not None or self.is_scored or len(self.sampled) == self.shards.num_tokens:
            return self
        return replace(self, query_rows=self.sampled_rows)

    @property
    def sampled_rows(self) -> Tensor:
        """Return the rows of the sampled tokens that this rank computes, int64."""
        rows = [query.location.row for query in self._own_sampled]
        return device_of(self.token_ids).put_index(rows)

    @property
    def _own_sampled(self) -> list[SampledQuery]:
        rank = 0 if self.shards.is_replicated else self.cp_rank
        return [query for query in self.sampled if query.location.cp_rank == rank]

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds only the pages it owns."""
        return len(self.prefix_lens_by_owner) > 1

    @property
    def own_prefix_lens(self) -> tuple[int, ...]:
        """Return the number of prefix tokens in this rank's pages, by request."""
        return self.prefix_lens_by_owner[self.cp_rank % len(self.prefix_lens_by_owner)]

    def owned_rows(self, cp_rank: int, null_slot: int) -> tuple[Tensor, Tensor]:
        """Return which of a rank's rows belong in this rank's pages, and their slots."""
        (pages,) = self.pages
        slots = pages.slots_on_host
        if not self.shards.is_replicated:
            begin = cp_rank * self.shards.padded_len
            slots = slots[begin : begin + self.shards.lens[cp_rank]]
        (rows,) = np.nonzero(slots != null_slot)
        both = device_of(pages.slots).put(torch.from_numpy(np.stack((rows, slots[rows]))))
        return both[0], both[1]


def build_step_batch(
    step: StepInput,
    *,
    cp: int,
    cp_rank: int,
    page_size: int,
    null_slot: int,
    device: Device,
    owners: int = 1,
) -> StepBatch:
    """Build one CP rank's batch of a step. Every rank of the group derives the same shards from the same requests.

    ``owners`` is cp if the pool is divided among the ranks, and 1 if each rank holds all pages.
    """
    scheduled, page_tables, shape, previous = step
    shards = plan_shards(scheduled, shape.strategy, cp)
    token_ids = np.fromiter(
        chain.from_iterable(request.token_ids for request in scheduled), np.int64, shards.num_tokens
    )
    offsets = np.array(shards.prefix_lens, dtype=np.int64) - np.array(shards.starts[:-1], dtype=np.int64)
    positions = np.repeat(offsets, shards.extend_lens) + np.arange(shards.num_tokens)
    part, in_page = cp_rank % owners, positions % page_size

    def slots_in(tables: Sequence[Indices]) -> Indices:
        """Return the slot of every gathered row in this rank's pool."""
        pages = _pages(shards, positions, tables, page_size)
        if owners == 1:
            slots = pages * page_size + in_page
        else:
            slots = np.where(pages % owners == part, pages // owners * page_size + in_page, null_slot)
        return slots if shards.is_replicated else np.append(slots, null_slot)[shards.gathered_index]

    def tensor(values: Indices) -> Tensor:
        return device.put(torch.from_numpy(values))

    def pages_in(tables: Sequence[Indices]) -> StepPages:
        own = tables if owners == 1 else [table[table % owners == part] // owners for table in tables]
        together, slots = tensor(np.concatenate([_NO_PAGES, *own])), slots_in(tables)
        return StepPages(tensor(slots), slots, together.split_with_sizes([len(table) for table in own]))

    pages = tuple(map(pages_in, page_tables))
    if not shards.is_replicated:
        local = shards.local(cp_rank)
        token_ids, positions = token_ids[local], positions[local]
    local_ids = tensor(token_ids)
    if previous is not None:
        previous.put_into(local_ids)
    return StepBatch(
        shape=shape,
        shards=shards,
        cp_rank=cp_rank,
        page_size=page_size,
        token_ids=local_ids,
        positions=tensor(positions),
        pages=pages,
        prefix_lens_by_owner=_prefix_lens_by_owner(shards.prefix_lens, page_tables[0], page_size, owners),
        sampled=_sampled_queries(shards, scheduled),
        is_scored=any(request.scored_ids for request in scheduled),
    )


def _sampled_queries(shards: ShardPlan, scheduled: Sequence[ScheduledRequest]) -> tuple[SampledQuery, ...]:
    sampled = [number for number, request in enumerate(scheduled) if request.samples]
    if shards.is_replicated and shards.num_tokens == len(shards.runs[0]) == len(scheduled):
        return tuple(SampledQuery(TokenLocation(0, request), shards.runs[0][request]) for request in sampled)
    positions = [shards.prefix_lens[request] + shards.extend_lens[request] - 1 for request in sampled]
    return tuple(
        SampledQuery(shards.locate(shards.last_token(request)), Run(request, position, 1, 1))
        for request, position in zip(sampled, positions, strict=True)
    )


def _pages(shards: ShardPlan, positions: Indices, tables: Sequence[Indices], page_size: int) -> Indices:
    """Return the page of every token in the flattened batch. Only the new tokens' pages are read."""
    used, num_used = [_NO_PAGES], 0
    entries: list[int] = []
    for prefix_len, extend_len, table in zip(shards.prefix_lens, shards.extend_lens, tables, strict=True):
        first, end = prefix_len // page_size, -(-(prefix_len + extend_len) // page_size)
        assert len(table) >= end, f"request {len(entries)} has {len(table)} pages but needs {end}"
        used.append(table[first:end])
        entries.append(num_used - first)
        num_used += len(used[-1])
    pages: Indices = np.concatenate(used)[
        np.repeat(np.array(entries, np.int64), shards.extend_lens) + positions // page_size
    ]
    return pages


def _prefix_lens_by_owner(
    prefix_lens: Sequence[int], tables: Sequence[Indices], page_size: int, owners: int
) -> tuple[tuple[int, ...], ...]:
    if owners == 1:
        return (tuple(prefix_lens),)
    lens = np.zeros((owners, len(tables)), dtype=np.int64)
    for request, (prefix_len, table) in enumerate(zip(prefix_lens, tables, strict=True)):
        held = np.clip(prefix_len - np.arange(len(table)) * page_size, 0, page_size)
        np.add.at(lens[:, request], table % owners, held)
    return tuple(tuple(int(length) for length in of_owner) for of_owner in lens)
