"""Cost of experts divided among ranks: each collective is counted, and dividing a step must pay for its exchange."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.config import ParallelConfig
from cluster.spec.ranks import axis_problems
from cluster.spec.strategy import MoeDispatch, Strategy, StrategySetting
from tests.fakes.steps import requests_of
from tests.fakes.thread_layout import on_thread_layout
from tests.unit.workers.test_cost_model import RATES, SHAPE
from workers.context_parallel.chunk_sizes import even_chunk
from workers.context_parallel.cost_model import ModelShape, estimate_step_s
from workers.context_parallel.shard_plan import make_shard_plan
from workers.context_parallel.strategy_chooser import StrategyChooser
from workers.expert_parallel.dispatch_cost import BlockShape, ExpertExchange, ExpertTraffic
from workers.layers.config import MoeConfig
from workers.layers.feed_forward import MoeBlock
from workers.parallel.communicator import Communicator
from workers.parallel.model_groups import ModelGroups

HIDDEN = 6
MOE = MoeConfig(num_experts=4, top_k=2, intermediate_size=8, renormalize=True)
LAYOUTS = [
    layout
    for dp in (1, 2)
    for cp in (1, 2)
    for tp in (1, 2)
    for ep in (1, 2, 4)
    for moe_dp in {1, cp}
    if not axis_problems(layout := ParallelConfig(dp=dp, cp=cp, tp=tp, ep=ep, moe_dp=moe_dp), "")
]


def exchange(parallel: ParallelConfig, dispatch: MoeDispatch = MoeDispatch.AUTO, top_k: int = 2) -> ExpertExchange:
    return ExpertExchange(
        block=BlockShape.of(parallel, top_k, 1.0),
        dp=parallel.dp,
        dispatch=dispatch,
        waits_for_counts=False,
        row_bytes=1024,
        sum_bytes=2048,
    )


def shape_with(experts: ExpertExchange | None) -> ModelShape:
    return dataclasses.replace(SHAPE, expert_flops=4_700_000, expert_share=1.0, experts=experts)


STEPS = [
    (layout, lens)
    for layout in LAYOUTS
    for lens in ((4,), (3, 5, 1, 2), ())
    if lens or layout.dp == 1  # DP ranks never have the same tokens
]


@pytest.mark.parametrize("dispatch", [MoeDispatch.GATHER, MoeDispatch.ALL_TO_ALL])
@pytest.mark.parametrize(("parallel", "lens"), STEPS, ids=str)
def test_every_collective_is_counted(parallel: ParallelConfig, dispatch: MoeDispatch, lens: tuple[int, ...]) -> None:
    num_shards = parallel.dp * parallel.cp
    shard_lens = tuple(lens[shard % len(lens)] for shard in range(num_shards)) if lens else None

    def run(groups: ModelGroups) -> int:
        block = MoeBlock(HIDDEN, MOE, groups)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter)
        calls = list[str]()
        counted: set[Communicator] = {groups.moe_shards}
        if dispatch is MoeDispatch.ALL_TO_ALL:
            # Its last gather is over TP ranks if these alone have the same tokens.
            counted = {groups.moe_block, groups.tp} if shard_lens else {groups.moe_block}
        for group in counted:
            group.observe = lambda call, *_: calls.append(call)
        num_tokens = 5 if shard_lens is None else shard_lens[groups.global_rank // parallel.tp]
        block(torch.ones(num_tokens, HIDDEN), shard_lens)
        return len(calls) // 2  # the start of a call, and the wait for it

    with torch.inference_mode():
        counts = on_thread_layout(parallel, run, dispatch)
    traffic = exchange(parallel, dispatch).traffic(shard_lens or (5,))
    assert counts[0] == traffic.num_collectives


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@given(data=st.data())
def test_every_token_is_computed_once(parallel: ParallelConfig, data: st.DataObject) -> None:
    size = parallel.dp * parallel.cp
    lens = data.draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))
    per_shard = exchange(parallel).tokens_per_shard(lens)
    assert sum(lens) / size <= per_shard <= max(lens)
    if parallel.moe_dp == 1:
        assert per_shard == pytest.approx(sum(lens) / size)


@given(st.integers(2, 8), st.integers(1, 4096), st.integers(0, 4096))
def test_ranks_share_the_experts_of_an_undivided_step(cp: int, new: int, prefix: int) -> None:
    """A rank then computes its own experts only, here without the time of an exchange."""
    plan, parallel = make_shard_plan(Strategy.NONE, [new], [prefix], cp), ParallelConfig(cp=cp, ep=cp)
    rates = dataclasses.replace(RATES, exchange_s=0.0, exchange_bytes_per_s=1e30)
    saved_s = estimate_step_s(plan, shape_with(None), rates) - estimate_step_s(
        plan, shape_with(exchange(parallel)), rates
    )
    experts_s = 7 * new * shape_with(None).expert_flops / rates.linear_flops_per_s
    assert saved_s == pytest.approx(experts_s * (1 - 1 / cp))


@given(st.integers(2, 8), st.integers(1, 8192))
def test_copies_of_all_experts_cost_what_no_division_does(cp: int, new: int) -> None:
    alone = exchange(ParallelConfig(cp=cp, moe_dp=cp))
    for strategy in (Strategy.NONE, Strategy.ZIGZAG):
        plan = make_shard_plan(strategy, [new], [0], cp)
        expected_s = estimate_step_s(plan, shape_with(None), RATES)
        longest_s = (max(plan.lens) - min(plan.lens)) * 7 * 6_300_000 / RATES.linear_flops_per_s
        assert estimate_step_s(plan, shape_with(alone), RATES) == pytest.approx(expected_s, abs=longest_s + 1e-9)


def test_divided_experts_move_the_length_from_which_a_prompt_is_divided() -> None:
    """A divided step exchanges its tokens twice, and an undivided one computes each rank's experts only."""

    def first_divided(experts: ExpertExchange | None) -> int:
        chooser = StrategyChooser(setting=StrategySetting.AUTO, cp=2, shape=shape_with(experts), rates=RATES)
        lens = (1 << power for power in range(20))
        return next(num for num in lens if chooser(requests_of([num], [0])).shape.strategy is not Strategy.NONE)

    assert first_divided(exchange(ParallelConfig(cp=2, ep=2))) > 4 * first_divided(None)


def test_chunks_with_an_exchange_of_tokens_take_equally_long_after_any_prefix() -> None:
    shape = shape_with(exchange(ParallelConfig(cp=2, ep=2)))
    rates = dataclasses.replace(RATES, step_s=0.0, run_s=0.0, exchange_s=0.0, row_s=0.0)
    chunk = even_chunk(shape, rates, 2, 8192)

    def step_s(prefix: int) -> float:
        return estimate_step_s(make_shard_plan(Strategy.ZIGZAG, [chunk(prefix)], [prefix], 2), shape, rates)

    assert [step_s(prefix) for prefix in (999, 20_000, 90_000)] == pytest.approx([step_s(0)] * 3, rel=0.1)


def test_a_model_without_division_exchanges_nothing() -> None:
    found = exchange(ParallelConfig()).traffic([100])
    assert found == ExpertTraffic(MoeDispatch.GATHER, 0.0, 0.0, 0)
