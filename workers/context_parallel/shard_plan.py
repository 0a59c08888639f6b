"""Assignment of tokens to ranks: strategies, shard plans, and step shapes. No torch, no I/O.

A strategy is a pure function from (extend lengths, prefix lengths, cp) to the runs of each rank. It may return empty
or adjacent runs, which the plan drops or joins. Nothing else in the engine depends on the strategy.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from cluster.spec.ids import Room
from cluster.spec.step_messages import ScheduledRequest, StepPlan, StepShape
from cluster.spec.strategy import Passing, Strategy
from workers.attention.runs import RankRuns, Run, coalesce

Split = Callable[[Sequence[int], Sequence[int], int], list[list[Run]]]


def whole_runs(extend_lens: Sequence[int], prefix_lens: Sequence[int]) -> list[Run]:
    """Return one run with all extend tokens of each request."""
    lens = zip(extend_lens, prefix_lens, strict=True)
    return [Run(request, prefix, length, 1) for request, (length, prefix) in enumerate(lens)]


def none(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    return [whole_runs(extend_lens, prefix_lens)] * cp


def whole_request(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    """Assign entire requests, heaviest first, each to the rank with the fewest (query, key) pairs so far."""
    loads = [(0, cp_rank) for cp_rank in range(cp)]
    ranks: list[list[Run]] = [[] for _ in range(cp)]
    for run in sorted(whole_runs(extend_lens, prefix_lens), key=lambda run: -run.num_pairs):
        load, cp_rank = loads[0]
        heapq.heapreplace(loads, (load + run.num_pairs, cp_rank))
        ranks[cp_rank].append(run)
    return [sorted(runs, key=lambda run: run.request) for runs in ranks]


def contiguous(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    return _by_segment(extend_lens, prefix_lens, cp, [[cp_rank] for cp_rank in range(cp)])


def zigzag(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    """Assign each rank a light early segment and a heavy late segment, so that causal work is balanced."""
    return _by_segment(extend_lens, prefix_lens, 2 * cp, [[cp_rank, 2 * cp - 1 - cp_rank] for cp_rank in range(cp)])


def interleave(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    """Assign tokens round robin over the flattened batch, continuing from request to request."""
    ranks: list[list[Run]] = [[] for _ in range(cp)]
    start = 0
    for request, (length, prefix) in enumerate(zip(extend_lens, prefix_lens, strict=True)):
        for cp_rank, runs in enumerate(ranks):
            first = (cp_rank - start) % cp
            runs.append(Run(request, prefix + first, -((first - length) // cp), cp))
        start += length
    return ranks


def _by_segment(
    extend_lens: Sequence[int], prefix_lens: Sequence[int], parts: int, segments_of: Sequence[Sequence[int]]
) -> list[list[Run]]:
    """Divide every request into equal parts, the first ``length % parts`` one token longer, and assign each rank its
    segments.
    """
    ranks: list[list[Run]] = [[] for _ in segments_of]
    for request, (length, prefix) in enumerate(zip(extend_lens, prefix_lens, strict=True)):
        base, rest = divmod(length, parts)
        for runs, segments in zip(ranks, segments_of, strict=True):
            runs.extend(
                Run(request, prefix + part * base + min(part, rest), base + (part < rest), 1) for part in segments
            )
    return ranks


STRATEGIES: dict[Strategy, Split] = {
    Strategy.NONE: none,
    Strategy.WHOLE_REQUEST: whole_request,
    Strategy.CONTIGUOUS: contiguous,
    Strategy.ZIGZAG: zigzag,
    Strategy.INTERLEAVE: interleave,
}


Indices = NDArray[np.int64]


class TokenLocation(NamedTuple):
    """Rank that computes a token, and the token's row in that rank's local order."""

    cp_rank: int
    row: int


@dataclass(frozen=True)
class ShardPlan:
    """One step's extend tokens, divided among the CP ranks.

    The *flattened batch* is all extend tokens, request after request. The *gathered order* is the local rows of
    rank 0, 1, ... each padded to ``padded_len``; in a replicated plan it is the flattened batch itself.
    """

    cp: int
    strategy: Strategy
    extend_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    runs: tuple[RankRuns, ...]
    """Runs by rank, in local order; none is empty."""

    @property
    def is_replicated(self) -> bool:
        """Return whether every rank computes every token, so that no collective is needed."""
        return self.cp == 1 or self.strategy is Strategy.NONE

    @property
    def distinct_runs(self) -> tuple[RankRuns, ...]:
        """Return the runs of the ranks that compute different tokens: of all ranks, or of one."""
        return self.runs[:1] if self.is_replicated else self.runs

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.extend_lens)

    @cached_property
    def most_keys(self) -> int:
        """Return the maximum number of keys that a query of the step sees, on any rank."""
        return max(map(add, self.prefix_lens, self.extend_lens), default=0)

    def num_keys(self, runs: Iterable[Run]) -> int:
        """Return the number of all keys of the requests that have runs."""
        return sum(self.prefix_lens[request] + self.extend_lens[request] for request in {run.request for run in runs})

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Flattened index of each request's first extend token, followed by the total."""
        return tuple(accumulate(self.extend_lens, initial=0))

    @cached_property
    def lens(self) -> tuple[int, ...]:
        return tuple(sum(run.count for run in runs) for runs in self.runs)

    @cached_property
    def padded_len(self) -> int:
        return max(self.lens)

    def gathered_rows(self, cp_rank: int) -> slice:
        """Return the places of a rank's rows in gathered order, without padding."""
        begin = 0 if self.is_replicated else cp_rank * self.padded_len
        return slice(begin, begin + self.lens[cp_rank])

    @cached_property
    def gathered_index(self) -> Indices:
        """``[cp * padded_len]``: flattened index of each gathered row; ``num_tokens`` marks padding."""
        if self.is_replicated:
            return np.arange(self.num_tokens, dtype=np.int64)
        index = np.full((self.cp, self.padded_len), self.num_tokens, dtype=np.int64)
        for cp_rank, length in enumerate(self.lens):
            index[cp_rank, :length] = self.local(cp_rank)
        return index.reshape(-1)

    @cached_property
    def inverse(self) -> Indices:
        """``[num_tokens]``: gathered row of each token of the flattened batch."""
        rows = np.empty(self.num_tokens + 1, dtype=np.int64)
        rows[self.gathered_index] = np.arange(len(self.gathered_index), dtype=np.int64)
        return rows[:-1]

    def local(self, cp_rank: int) -> Indices:
        """Return the flattened indices of a rank's tokens, in its local order."""
        if self.is_replicated:
            return np.arange(self.num_tokens, dtype=np.int64)
        parts = [self._flattened(run) for run in self.runs[cp_rank]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def locate(self, token: int) -> TokenLocation:
        """Return the location of a token of the flattened batch. In a replicated plan, the rank is always 0."""
        if self.is_replicated:
            return TokenLocation(0, token)
        return TokenLocation(*divmod(int(self.inverse[token]), self.padded_len))

    def last_token(self, request: int) -> int:
        assert self.extend_lens[request] > 0, f"request {request} has no extend tokens"
        return self.starts[request + 1] - 1

    def _flattened(self, run: Run) -> Indices:
        first = self.starts[run.request] + run.first_position - self.prefix_lens[run.request]
        return np.arange(first, first + run.count * run.step, run.step, dtype=np.int64)


def make_shard_plan(strategy: Strategy, extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> ShardPlan:
    """Divide a step's tokens. ``extend_lens`` count tokens to compute, and ``prefix_lens`` tokens already cached."""
    assert cp > 0, f"cp must be positive, got {cp}"
    assert len(extend_lens) == len(prefix_lens), f"{len(extend_lens)} extend, {len(prefix_lens)} prefix lengths"
    assert min((*extend_lens, *prefix_lens), default=0) >= 0, f"negative length in {extend_lens} or {prefix_lens}"
    split = STRATEGIES[strategy] if cp > 1 else none
    if split is none:
        # A decode step has no runs to drop or join.
        runs = (tuple(run for run in none(extend_lens, prefix_lens, 1)[0] if run.count),) * cp
    else:
        runs = tuple(coalesce(rank_runs) for rank_runs in split(extend_lens, prefix_lens, cp))
    return ShardPlan(cp, strategy, tuple(extend_lens), tuple(prefix_lens), runs)


def make_step_shape(
    scheduled: Sequence[ScheduledRequest],
    strategy: Strategy = Strategy.NONE,
    passing: Passing | None = None,
    cp: int = 1,
) -> StepShape:
    """Return the shape of one DP rank's part of a step. An undivided decode step needs no shard plan."""
    if (cp == 1 or strategy is Strategy.NONE) and _is_decode(scheduled):
        lens = (len(scheduled),)
        return StepShape(strategy=strategy, passing=passing, shard_lens=lens, last_layer_lens=lens, is_decode=True)
    return shape_of_plan(plan_shards(scheduled, strategy, cp), scheduled, passing)


def plan_shards(scheduled: Sequence[ScheduledRequest], strategy: Strategy, cp: int) -> ShardPlan:
    lens = [len(request.token_ids) for request in scheduled]
    return make_shard_plan(strategy, lens, [request.first_position for request in scheduled], cp)


def shape_of_plan(plan: ShardPlan, scheduled: Sequence[ScheduledRequest], passing: Passing | None) -> StepShape:
    shards = plan.distinct_runs
    lens = last_layer_lens = plan.lens[: len(shards)]
    if passing is not Passing.PASS_Q and not any(request.scored_ids for request in scheduled):
        # In the last layer, only tokens to sample have queries.
        ends = [request.first_position + len(request.token_ids) - 1 for request in scheduled]
        last_layer_lens = tuple(
            sum(scheduled[run.request].samples and run.last_position == ends[run.request] for run in runs)
            for runs in shards
        )
    return StepShape(
        strategy=plan.strategy,
        passing=passing,
        shard_lens=lens,
        last_layer_lens=last_layer_lens,
        is_decode=_is_decode(scheduled),
    )


def join_shapes(shapes: Sequence[StepShape], cp: int) -> list[StepShape]:
    """Give each DP rank's shape the token counts of all DP ranks. A single shape stays unchanged."""
    if len(shapes) == 1:
        return list(shapes)
    lens = tuple(count for shape in shapes for count in _by_cp_rank(shape.shard_lens, cp))
    last_layer_lens = tuple(count for shape in shapes for count in _by_cp_rank(shape.last_layer_lens, cp))
    is_decode = all(shape.is_decode for shape in shapes)
    return [replace(shape, shard_lens=lens, last_layer_lens=last_layer_lens, is_decode=is_decode) for shape in shapes]


def idle_plan() -> StepPlan:
    """Return the plan of a DP rank that has no requests and only participates in collectives."""
    return StepPlan(step=0, shape=StepShape(), new_requests=[], scheduled=[], releases=[])


def dummy_request(num_tokens: int, prefix_len: int = 0) -> ScheduledRequest:
    """Return a scheduled last chunk of a prompt, for warm-up and measured steps."""
    return ScheduledRequest(
        room=Room(0),
        first_position=prefix_len,
        token_ids=[0] * num_tokens,
        new_pages=[],
        samples=True,
        output_position=0,
    )


def _is_decode(scheduled: Sequence[ScheduledRequest]) -> bool:
    return all(len(request.token_ids) == 1 and request.samples and not request.scored_ids for request in scheduled)


def _by_cp_rank(lens: tuple[int, ...], cp: int) -> tuple[int, ...]:
    """Return the token counts of one DP rank's CP ranks. A token computed on every rank counts on each."""
    return lens * cp if len(lens) == 1 else lens
