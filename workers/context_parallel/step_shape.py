"""Shape of a step: built once by the leader from scheduled requests, and of dummy steps likewise. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from cluster.spec.ids import Room
from cluster.spec.step_messages import ScheduledRequest, StepPlan, StepShape
from cluster.spec.strategy import Passing, Strategy
from workers.context_parallel.shard_plan import ShardPlan, make_shard_plan


def make_step_shape(
    scheduled: Sequence[ScheduledRequest],
    strategy: Strategy = Strategy.NONE,
    passing: Passing | None = None,
    cp: int = 1,
) -> StepShape:
    """Return the shape of one DP rank's part of a step; one of decode that is not divided needs no shard plan."""
    if (cp == 1 or strategy is Strategy.NONE) and _is_decode(scheduled):
        lens = (len(scheduled),)
        return StepShape(strategy=strategy, passing=passing, shard_lens=lens, last_shard_lens=lens, is_decode=True)
    return shape_of_plan(plan_shards(scheduled, strategy, cp), scheduled, passing)


def plan_shards(scheduled: Sequence[ScheduledRequest], strategy: Strategy, cp: int) -> ShardPlan:
    """Divide the tokens of scheduled requests over the CP ranks."""
    lens = [len(request.token_ids) for request in scheduled]
    return make_shard_plan(strategy, lens, [request.first_position for request in scheduled], cp)


def shape_of_plan(plan: ShardPlan, scheduled: Sequence[ScheduledRequest], passing: Passing | None) -> StepShape:
    """Return the shape of a step whose shard plan is known."""
    shards = plan.runs[:1] if plan.replicated else plan.runs
    lens = last = plan.lens[: len(shards)]
    if passing is not Passing.PASS_Q and not any(request.targets for request in scheduled):
        # Only sampled tokens have queries in the last layer.
        ends = [request.first_position + len(request.token_ids) - 1 for request in scheduled]
        last = tuple(
            sum(scheduled[run.request].samples and run.last_position == ends[run.request] for run in runs)
            for runs in shards
        )
    return StepShape(
        strategy=plan.strategy,
        passing=passing,
        shard_lens=lens,
        last_shard_lens=last,
        is_decode=_is_decode(scheduled),
    )


def join_shapes(shapes: Sequence[StepShape], cp: int) -> list[StepShape]:
    """Complete the shapes of one step by DP rank with the token counts of all; unchanged if there is one."""
    if len(shapes) == 1:
        return list(shapes)
    lens = tuple(count for shape in shapes for count in _by_cp_rank(shape.shard_lens, cp))
    last = tuple(count for shape in shapes for count in _by_cp_rank(shape.last_shard_lens, cp))
    is_decode = all(shape.is_decode for shape in shapes)
    return [replace(shape, shard_lens=lens, last_shard_lens=last, is_decode=is_decode) for shape in shapes]


def idle_plan() -> StepPlan:
    """Return the plan of a DP rank that only takes part in others' collectives."""
    return StepPlan(step=0, shape=StepShape(), admits=[], scheduled=[], releases=[])


def dummy_request(num_tokens: int, prefix_len: int = 0) -> ScheduledRequest:
    """Return a prompt's last chunk, for steps that warm up or are measured."""
    return ScheduledRequest(
        room=Room(0),
        first_position=prefix_len,
        token_ids=[0] * num_tokens,
        new_pages=[],
        samples=True,
        output_position=0,
    )


def _is_decode(scheduled: Sequence[ScheduledRequest]) -> bool:
    return all(len(request.token_ids) == 1 and request.samples and not request.targets for request in scheduled)


def _by_cp_rank(lens: tuple[int, ...], cp: int) -> tuple[int, ...]:
    """Return the counts of the CP ranks of one DP rank; tokens computed on several ranks count on each."""
    return lens * cp if len(lens) == 1 else lens
