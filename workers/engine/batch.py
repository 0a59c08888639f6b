"""Tensors of one rank's share of a step: tokens, positions, KV slots, and requests to sample."""

from collections.abc import Callable, Sequence
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
from workers.device import on_device
from workers.engine.step_state import PreviousTokens

_NO_PAGES = np.empty(0, dtype=np.int64)


class LastToken(NamedTuple):
    """Last token of a sampled request."""

    location: TokenLocation
    run: Run


class StepInput(NamedTuple):
    """Input of a step, the same on every rank of a CP group."""

    scheduled: Sequence[ScheduledRequest]
    page_tables: Sequence[Sequence[NDArray[np.int64]]]
    """Pages by lifetime and request, in order of position, enough for prefix and extend. Page p of a pool divided over
    n owners is page p // n of owner p mod n.
    """
    shape: StepShape
    previous: PreviousTokens | None = None
    """Input tokens that the previous step samples."""


class StepPages(NamedTuple):
    """Pages of one lifetime in a step, on one rank."""

    slots: Tensor
    """Slots ``[gathered rows]`` int64 for K and V of each gathered row; padding and tokens of other owners go to the
    null slot.
    """
    slots_on_host: Indices
    """Host copy of ``slots``, readable without waiting for a GPU."""
    tables: tuple[Tensor, ...]
    """Pages by request, int64, in order of position."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's share of a step."""

    shape: StepShape
    plan: ShardPlan
    cp_rank: int
    page_size: int
    token_ids: Tensor
    """``[tokens]`` int64, this rank's, in local order."""
    positions: Tensor
    """``[tokens]`` int64, position of each local token in its request."""
    pages: tuple[StepPages, ...]
    """Pages by lifetime."""
    prefix_shares: tuple[tuple[int, ...], ...]
    """Number of prefix tokens in an owner's pages, by owner and request."""
    sampled: tuple[LastToken, ...]
    """Last tokens of sampled requests, in the order of the batch."""
    wanted: Tensor | None = None
    """Rows of this rank's tokens that have queries, int64; None if all have."""
    is_scored: bool = False
    """Whether final hidden states of all tokens are needed."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """Query runs of this rank, in local order."""
        if self.wanted is None:
            return self.plan.runs[self.cp_rank]
        return tuple(sample.run for sample in self._samples)

    def narrowed(self) -> "StepBatch":
        """Return the batch with queries of sampled tokens alone, or itself if every token is sampled or scored."""
        if self.wanted is not None or self.is_scored or len(self.sampled) == self.plan.num_tokens:
            return self
        return replace(self, wanted=self.sampled_rows)

    @property
    def sampled_rows(self) -> Tensor:
        """Rows of the sampled tokens that this rank computes, int64."""
        rows = [sample.location.row for sample in self._samples]
        return on_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.token_ids.device)

    @property
    def _samples(self) -> list[LastToken]:
        """Return the samples that this rank computes."""
        rank = 0 if self.plan.replicated else self.cp_rank
        return [sample for sample in self.sampled if sample.location.cp_rank == rank]

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds only the pages that it owns."""
        return len(self.prefix_shares) > 1

    @property
    def prefix_share(self) -> tuple[int, ...]:
        """Tokens of each request's prefix that are in this rank's pages."""
        return self.prefix_shares[self.cp_rank % len(self.prefix_shares)]

    def owned_rows(self, cp_rank: int, null_slot: int) -> tuple[Tensor, Tensor]:
        """Return the rows, in a rank's local order, that belong in this rank's pages, and their slots."""
        (pages,) = self.pages
        slots = pages.slots_on_host
        if not self.plan.replicated:
            begin = cp_rank * self.plan.padded_len
            slots = slots[begin : begin + self.plan.lens[cp_rank]]
        (rows,) = np.nonzero(slots != null_slot)
        both = on_device(torch.from_numpy(np.stack((rows, slots[rows]))), pages.slots.device)
        return both[0], both[1]


def build_step_batch(
    step: StepInput,
    *,
    cp: int,
    cp_rank: int,
    page_size: int,
    null_slot: int,
    device: torch.device,
    owners: int = 1,
) -> StepBatch:
    """Build one CP rank's batch of a step; every rank of the group derives the same plan from the same requests.

    ``owners`` is cp if the pool is divided over the ranks, and 1 if each holds all pages.
    """
    scheduled, page_tables, shape, previous = step
    plan = plan_shards(scheduled, shape.strategy, cp)
    token_ids = np.fromiter(chain.from_iterable(request.token_ids for request in scheduled), np.int64, plan.num_tokens)
    behind = np.array(plan.prefix_lens, dtype=np.int64) - np.array(plan.starts[:-1], dtype=np.int64)
    positions = np.repeat(behind, plan.extend_lens) + np.arange(plan.num_tokens)
    part = cp_rank % owners
    slots = [
        _slots(plan, _pages(plan, positions, tables, page_size), positions, page_size, part, owners, null_slot)
        for tables in page_tables
    ]
    if not plan.replicated:
        local = plan.local(cp_rank)
        token_ids, positions = token_ids[local], positions[local]

    def tensor(values: Indices) -> Tensor:
        return on_device(torch.from_numpy(values), device)

    local_ids = tensor(token_ids)
    if previous is not None:
        previous.put_into(local_ids)
    return StepBatch(
        shape=shape,
        plan=plan,
        cp_rank=cp_rank,
        page_size=page_size,
        token_ids=local_ids,
        positions=tensor(positions),
        pages=tuple(
            StepPages(tensor(of_one), of_one, _split(tensor, [_own(table, part, owners) for table in tables]))
            for of_one, tables in zip(slots, page_tables, strict=True)
        ),
        prefix_shares=_prefix_shares(plan.prefix_lens, page_tables[0], page_size, owners),
        sampled=_samples(plan, scheduled),
        is_scored=any(request.scored_ids for request in scheduled),
    )


def _slots(
    plan: ShardPlan,
    pages: Indices,
    positions: Indices,
    page_size: int,
    part: int,
    owners: int,
    null_slot: int,
) -> Indices:
    """Return the slot of every gathered row on the rank that owns a part of the pages."""
    in_page = positions % page_size
    slots = pages * page_size + in_page
    if owners > 1:
        slots = np.where(pages % owners == part, pages // owners * page_size + in_page, null_slot)
    return slots if plan.replicated else np.append(slots, null_slot)[plan.gathered_index]


def _split(tensor: Callable[[Indices], Tensor], tables: Sequence[Indices]) -> tuple[Tensor, ...]:
    """Move tables to the device as one tensor; return its parts."""
    return tensor(np.concatenate([_NO_PAGES, *tables])).split_with_sizes([len(table) for table in tables])


def _samples(plan: ShardPlan, scheduled: Sequence[ScheduledRequest]) -> tuple[LastToken, ...]:
    sampled = [number for number, request in enumerate(scheduled) if request.samples]
    if plan.replicated and plan.num_tokens == len(plan.runs[0]) == len(scheduled):
        return tuple(LastToken(TokenLocation(0, request), plan.runs[0][request]) for request in sampled)
    last = [plan.prefix_lens[request] + plan.extend_lens[request] - 1 for request in sampled]
    return tuple(
        LastToken(plan.locate(plan.last_token(request)), Run(request, position, 1, 1))
        for request, position in zip(sampled, last, strict=True)
    )


def _pages(plan: ShardPlan, positions: Indices, tables: Sequence[Indices], page_size: int) -> Indices:
    """Return the page of every token of the flattened batch. Only pages of new tokens are read, however long prefixes
    are.
    """
    used, num_used = [_NO_PAGES], 0
    entries: list[int] = []
    for prefix_len, extend_len, table in zip(plan.prefix_lens, plan.extend_lens, tables, strict=True):
        first, end = prefix_len // page_size, -(-(prefix_len + extend_len) // page_size)
        assert len(table) >= end, f"request {len(entries)} has {len(table)} pages and needs {end}"
        used.append(table[first:end])
        entries.append(num_used - first)
        num_used += len(used[-1])
    pages: Indices = np.concatenate(used)[
        np.repeat(np.array(entries, np.int64), plan.extend_lens) + positions // page_size
    ]
    return pages


def _own(table: Indices, part: int, owners: int) -> Indices:
    """Return a rank's pages by their local numbers."""
    return table if owners == 1 else table[table % owners == part] // owners


def _prefix_shares(
    prefix_lens: Sequence[int], tables: Sequence[Indices], page_size: int, owners: int
) -> tuple[tuple[int, ...], ...]:
    """Return the number of prefix tokens per owner and request. Only a prefix's last page may be partly filled."""
    if owners == 1:
        return (tuple(prefix_lens),)
    shares = np.zeros((owners, len(tables)), dtype=np.int64)
    for request, (prefix_len, table) in enumerate(zip(prefix_lens, tables, strict=True)):
        held = np.clip(prefix_len - np.arange(len(table)) * page_size, 0, page_size)
        np.add.at(shares[:, request], table % owners, held)
    return tuple(tuple(int(share) for share in of_owner) for of_owner in shares)
