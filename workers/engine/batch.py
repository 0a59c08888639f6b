"""One rank's share of a step's tokens, the requests that it knows, and the tokens sampled for them.

A step may use tokens that the previous step has sampled but the host has not read yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from cluster.spec.ids import Room
from cluster.spec.kv import NO_PAGE
from cluster.spec.sampling import Sampled, TokenLogprobs
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepShape
from workers.attention.runs import Run
from workers.context_parallel.shard_plan import Indices, ShardPlan, TokenLocation, plan_shards
from workers.device import Device, Event, device_of
from workers.engine.owned_pages import OwnedPages
from workers.engine.sampler import PendingSamples
from workers.parallel.communicator import Communicator

_NO_PAGES = np.empty(0, dtype=np.int64)


class PageTable:
    """Pages of one request in order of position. The array grows in place, so that steps do not copy earlier pages."""

    def __init__(self) -> None:
        self._pages = np.empty(16, dtype=np.int64)
        self._len = 0

    def extend(self, pages: Sequence[int], null_page: int) -> None:
        """Append pages. The null page replaces pages that no token of this request will see."""
        end = self._len + len(pages)
        if end > len(self._pages):
            self._pages = np.concatenate([self._pages, np.empty(max(end, len(self._pages)), dtype=np.int64)])
        self._pages[self._len : end] = [null_page if page == NO_PAGE else page for page in pages]
        self._len = end

    @property
    def all(self) -> NDArray[np.int64]:
        """Return all pages so far. Later calls to ``extend`` do not change the result."""
        return self._pages[: self._len]


class KnownRequest(NewRequest, frozen=True, kw_only=True):
    """Request introduced by a NewRequest, with the state that a rank adds."""

    tables: list[PageTable]
    """Page tables by lifetime. In a sharded pool, page p is page p // cp of CP rank p % cp."""
    prompt_logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    """Prompt log-probabilities computed so far, until they are reported with the first sampled token."""

    @classmethod
    def of(cls, request: NewRequest, num_lifetimes: int) -> "KnownRequest":
        return cls(**structs.asdict(request), tables=[PageTable() for _ in range(num_lifetimes)])

    @property
    def pages(self) -> list[list[int]]:
        """Return a copy of the tables, for senders."""
        return [table.all.tolist() for table in self.tables]


class PreviousTokens(NamedTuple):
    """Tokens sampled by the previous step that are inputs of this step."""

    indices: Tensor
    """Indices in the flattened batch, int64."""
    token_ids: Tensor

    def put_into(self, token_ids: Tensor) -> None:
        """Replace the placeholders in ``token_ids [tokens]``."""
        token_ids[self.indices] = self.token_ids


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of a step. Empty on a rank whose TP group does not sample."""

    rooms: Sequence[Room] = ()
    pending: PendingSamples | None = None
    """Samples in the order of ``rooms``. None if another TP rank samples."""
    prompt_logprobs: Mapping[Room, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt log-probabilities to report with the token of each room."""

    def wait(self) -> dict[Room, Sampled]:
        """Wait for every sampled request's token. Call this only once."""
        sampled = dict(zip(self.rooms, self.pending.wait(), strict=True)) if self.pending is not None else {}
        reported = {
            room: structs.replace(sampled[room], prompt_logprobs=reported)
            for room, reported in self.prompt_logprobs.items()
        }
        return sampled | reported

    def input_of(
        self, scheduled: Sequence[ScheduledRequest], tp: Communicator, device: Device
    ) -> PreviousTokens | None:
        """Return tokens sampled by this step that are inputs of the next step, if any. Every TP rank calls this."""
        if not self.rooms or not any(request.input_from_previous_step for request in scheduled):
            return None
        if self.pending is not None:
            token_ids = self.pending.token_ids
        else:
            token_ids = torch.empty(len(self.rooms), dtype=torch.int64, device=device.torch_device)
        tp.broadcast(token_ids, root=0)
        sources = {room: index for index, room in enumerate(self.rooms)}
        begins = accumulate((len(request.token_ids) for request in scheduled), initial=0)
        pairs = [
            (begin, sources[request.room])
            for begin, request in zip(begins, scheduled, strict=False)
            if request.input_from_previous_step
        ]
        indices, sampled = device.put(torch.tensor(pairs, dtype=torch.int64).T.contiguous())
        return PreviousTokens(indices, token_ids[sampled])


class BegunStep(NamedTuple):
    requests: Mapping[Room, KnownRequest]
    """Requests in the step. The next step may release some of them before this step ends."""
    sampled_tokens: SampledTokens
    end: Event | None = None

    @property
    def is_over(self) -> bool:
        """Return whether `wait` would return immediately."""
        if self.end is not None:
            return bool(self.end.query())  # type: ignore[no-untyped-call]
        return self.sampled_tokens.pending is None or self.sampled_tokens.pending.is_there

    def wait(self) -> dict[Room, Sampled]:
        """Wait until the step and its KV writes are complete. Call this only once.

        Returns every sampled request's token on the sampling rank, and nothing on other ranks.
        """
        sampled = self.sampled_tokens.wait()
        if self.end is not None:
            self.end.synchronize()
        return sampled


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
        first_owners=tuple(int(table[0]) % owners if len(table) else 0 for table in page_tables[0]),
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
    """Return the page of every token in the flattened batch. Only the table entries of new tokens are read."""
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
