"""Token counts of every attention shard in a step, so that shards can gather their tokens. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from cluster.spec.step_messages import StepPlan
from cluster.spec.strategy import Passing, Strategy
from workers.context_parallel.shard_plan import make_shard_plan


class ShardLens(NamedTuple):
    """Token counts by CP rank, or in a stage by dp * cp_size + cp."""

    every: tuple[int, ...]
    """Counts in every layer but the last."""
    last: tuple[int, ...]
    """Counts in the last layer, where tokens that nobody samples have no query."""


class Extend(NamedTuple):
    """Scheduled request of a step."""

    extend_len: int
    prefix_len: int
    samples: bool
    scored: bool = False
    """Whether final hidden states of all its tokens are needed."""


def lens_of(rows: Sequence[Extend], strategy: Strategy, passing: Passing | None, cp: int) -> ShardLens:
    """Return the counts of the CP ranks of one DP rank; tokens computed on several ranks count on each."""
    plan = make_shard_plan(strategy, [row.extend_len for row in rows], [row.prefix_len for row in rows], cp)
    if passing is Passing.PASS_Q or any(row.scored for row in rows):
        return ShardLens(plan.lens, plan.lens)
    last = [plan.owner(plan.last_token(number)).cp_rank for number, row in enumerate(rows) if row.samples]
    counts = [len(last)] * cp if plan.replicated else [last.count(cp_rank) for cp_rank in range(cp)]
    return ShardLens(plan.lens, tuple(counts))


def with_shard_lens(plans: Sequence[StepPlan], cp: int) -> list[StepPlan]:
    """Return the plans of one step by DP rank, with the other shards' lengths; unchanged if there is one."""
    if len(plans) == 1:
        return list(plans)
    lens = [_lens_of_plan(plan, cp) for plan in plans]
    every, last = ([count for of_rank in counts for count in of_rank] for counts in zip(*lens, strict=True))
    is_decode = all(map(_is_decode, plans))
    return [replace(plan, shard_lens=every, last_shard_lens=last, is_decode=is_decode) for plan in plans]


def idle_plan() -> StepPlan:
    """Return the plan of a DP rank that only takes part in others' collectives."""
    return StepPlan(step=0, strategy=Strategy.NONE, admits=[], scheduled=[], releases=[])


def _is_decode(plan: StepPlan) -> bool:
    return plan.layerwise_load is None and all(
        len(row.token_ids) == 1 and row.samples and not row.targets for row in plan.scheduled
    )


def _lens_of_plan(plan: StepPlan, cp: int) -> ShardLens:
    rows = [Extend(len(row.token_ids), row.first_position, row.samples, bool(row.targets)) for row in plan.scheduled]
    return lens_of(rows, plan.strategy, plan.passing, cp)
