"""One rank's share of a step's tokens."""

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
from workers.engine.begun_step import PreviousTokens
from workers.engine.owned_pages import OwnedPages
from workers.engine.step_pages import PageOwners, StepPages, make_step_pages


class SampledQuery(NamedTuple):
    """Last token of a request in a step, after which the next token is sampled."""

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
    first_owners: tuple[int, ...]
    """Owner of each request's first page. Owners of the following pages take turns."""
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
        """Return a batch with queries for sampled tokens only, or this batch if it cannot be narrowed further."""
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

    def owned_by(self, owner: int) -> OwnedPages:
        """Return the pages of each request that an owner holds."""
        owners = len(self.prefix_lens_by_owner)
        firsts = tuple((owner - first) % owners for first in self.first_owners)
        return OwnedPages(owners, firsts, self.page_size)

    def owned_rows(self, cp_rank: int, null_slot: int) -> tuple[Tensor, Tensor]:
        """Return the indices of those rows of a rank that belong in this rank's pages, and their slots."""
        (pages,) = self.pages
        slots = pages.slots_on_host[self.shards.gathered_rows(cp_rank)]
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
    token_ids, positions = _tokens(shards, scheduled)
    divided = PageOwners(owners, cp_rank % owners, page_size, null_slot)
    pages = tuple(make_step_pages(shards, positions, tables, divided, device) for tables in page_tables)
    if not shards.is_replicated:
        local = shards.local(cp_rank)
        token_ids, positions = token_ids[local], positions[local]
    ids_on_device = device.put(torch.from_numpy(token_ids))
    if previous is not None:
        previous.put_into(ids_on_device)
    return StepBatch(
        shape=shape,
        shards=shards,
        cp_rank=cp_rank,
        page_size=page_size,
        token_ids=ids_on_device,
        positions=device.put(torch.from_numpy(positions)),
        pages=pages,
        prefix_lens_by_owner=divided.prefix_lens(shards.prefix_lens, page_tables[0]),
        first_owners=divided.firsts(page_tables[0]),
        sampled=_sampled_queries(shards, scheduled),
        is_scored=any(request.scored_ids for request in scheduled),
    )


def _tokens(shards: ShardPlan, scheduled: Sequence[ScheduledRequest]) -> tuple[Indices, Indices]:
    """Return the ids of the flattened batch's tokens and their positions."""
    token_ids = np.fromiter(
        chain.from_iterable(request.token_ids for request in scheduled), np.int64, shards.num_tokens
    )
    offsets = np.array(shards.prefix_lens, dtype=np.int64) - np.array(shards.starts[:-1], dtype=np.int64)
    return token_ids, np.repeat(offsets, shards.extend_lens) + np.arange(shards.num_tokens)


def _sampled_queries(shards: ShardPlan, scheduled: Sequence[ScheduledRequest]) -> tuple[SampledQuery, ...]:
    sampled = [number for number, request in enumerate(scheduled) if request.samples]
    if shards.is_replicated and shards.num_tokens == len(shards.runs[0]) == len(scheduled):
        return tuple(SampledQuery(TokenLocation(0, request), shards.runs[0][request]) for request in sampled)
    positions = [shards.prefix_lens[request] + shards.extend_lens[request] - 1 for request in sampled]
    return tuple(
        SampledQuery(shards.locate(shards.last_token(request)), Run(request, position, 1, 1))
        for request, position in zip(sampled, positions, strict=True)
    )
