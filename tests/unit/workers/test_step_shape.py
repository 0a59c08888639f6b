"""The shape of a step equals the ranks' shard plans and batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.step_messages import StepShape
from cluster.spec.strategy import CpMode, Passing, Strategy, StrategySetting
from cluster.spec.tiers import TierJob, TierJobKind
from tests.fakes.sequences import sequence_of
from tests.fakes.steps import Request, scheduled_of, step_of
from workers.cache.page_allocator import PageAllocator
from workers.context_parallel.cost_model import ModelShape, Rates
from workers.context_parallel.shard_plan import join_shapes, make_shard_plan, make_step_shape
from workers.context_parallel.strategy_chooser import StrategyChooser, undivided
from workers.device import CPU
from workers.engine.batch import build_step_batch
from workers.scheduler.step_scheduler import StepLimits, StepScheduler

PAGE_SIZE = 4
ONE_TOKEN = Request([1], 4)
REQUESTS = st.lists(
    st.builds(
        Request,
        st.integers(1, 9).map(lambda length: [1] * length),
        st.integers(0, 9),
        st.just(range(5)),
        st.booleans(),
        st.booleans(),
    ),
    max_size=4,
) | st.lists(st.builds(Request, st.just([1]), st.integers(0, 9), st.just(range(5))), max_size=4)
STRATEGIES, PASSINGS, SIZES = st.sampled_from(Strategy), st.sampled_from([None, *Passing]), st.integers(1, 4)


def expected_lens(
    requests: list[Request], strategy: Strategy, passing: Passing | None, cp: int
) -> tuple[list[int], list[int]]:
    """Count each CP rank's tokens, and those with queries in the last layer, from the ranks' own tokens."""
    plan = make_shard_plan(
        strategy, [len(request.token_ids) for request in requests], [request.prefix_len for request in requests], cp
    )
    local = [plan.local(cp_rank).tolist() for cp_rank in range(cp)]
    lens = [len(tokens) for tokens in local]
    if passing is Passing.PASS_Q or any(request.scored for request in requests):
        return lens, lens
    wanted = {plan.last_token(number) for number, request in enumerate(requests) if request.samples}
    return lens, [len(wanted.intersection(tokens)) for tokens in local]


@given(REQUESTS, STRATEGIES, PASSINGS, SIZES)
def test_the_shape_equals_the_shard_plans_of_the_ranks(
    requests: list[Request], strategy: Strategy, passing: Passing | None, cp: int
) -> None:
    shape = make_step_shape(scheduled_of(requests), strategy, passing, cp)
    lens, last = expected_lens(requests, strategy, passing, cp)
    copies = cp if cp > 1 and strategy is Strategy.NONE else 1
    assert [*shape.shard_lens * copies] == lens
    assert [*shape.last_layer_lens * copies] == last
    assert (shape.strategy, shape.passing) == (strategy, passing)
    assert shape.is_decode == all(len(each.token_ids) == 1 and each.samples and not each.scored for each in requests)


@given(st.lists(st.tuples(REQUESTS, STRATEGIES, PASSINGS), min_size=2, max_size=4), SIZES)
def test_joined_shapes_count_the_tokens_of_all_dp_ranks(
    ranks: list[tuple[list[Request], Strategy, Passing | None]], cp: int
) -> None:
    shapes = [make_step_shape(scheduled_of(requests), strategy, passing, cp) for requests, strategy, passing in ranks]
    expected = [expected_lens(*rank, cp) for rank in ranks]
    for shape, (_, strategy, passing) in zip(join_shapes(shapes, cp), ranks, strict=True):
        assert (shape.strategy, shape.passing) == (strategy, passing)
        assert [*shape.shard_lens] == [count for lens, _ in expected for count in lens]
        assert [*shape.last_layer_lens] == [count for _, last in expected for count in last]
        assert shape.is_decode == all(each.is_decode for each in shapes)


@given(REQUESTS, STRATEGIES, SIZES)
def test_every_rank_computes_as_many_tokens_as_the_shape_says(
    requests: list[Request], strategy: Strategy, cp: int
) -> None:
    for cp_rank in range(cp):
        batch = build_step_batch(
            step_of(requests, strategy, cp),
            cp=cp,
            cp_rank=cp_rank,
            page_size=PAGE_SIZE,
            null_slot=100,
            device=CPU,
        )
        shard = 0 if batch.shards.is_replicated else cp_rank
        assert len(batch.token_ids) == batch.shape.shard_lens[shard]
        narrowed = batch.narrowed()
        num_queries = len(batch.token_ids) if narrowed.query_rows is None else len(narrowed.query_rows)
        assert num_queries == batch.shape.last_layer_lens[shard]


@given(REQUESTS, st.sampled_from(CpMode), SIZES)
def test_a_chooser_returns_the_shape_of_its_strategy_and_passing(
    requests: list[Request], mode: CpMode, cp: int
) -> None:
    size = ModelShape(
        num_layers=2,
        linear_flops=10**6,
        kv_flops=10**5,
        attention_flops=10**4,
        kv_row_bytes=64,
        q_row_bytes=64,
        partial_row_bytes=10**4,
    )
    scheduled = scheduled_of(requests)
    rates = Rates(exchange_s=0.0, step_s=0.0)
    shape = StrategyChooser(setting=StrategySetting.AUTO, cp=cp, shape=size, rates=rates, mode=mode)(scheduled).shape
    assert shape == make_step_shape(scheduled, shape.strategy, shape.passing, cp)


def test_a_decode_step_needs_no_shard_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.context_parallel.shard_plan.make_shard_plan", None)
    shape = undivided(scheduled_of([ONE_TOKEN] * 64)).shape
    assert shape == StepShape(shard_lens=(64,), last_layer_lens=(64,))


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_step_that_waits_for_pages_is_not_decode(monkeypatch: pytest.MonkeyPatch, *, is_loading: bool) -> None:
    """Otherwise one DP rank would compute while the others replay."""
    steps = StepScheduler(PageAllocator(4), StepLimits(PAGE_SIZE, 8, 8), undivided)
    load = TierJob(job_id=1, kind=TierJobKind.LOAD, pages=[]) if is_loading else None
    monkeypatch.setattr(steps.holders, "take_layerwise_load", lambda: load)
    steps.add(sequence_of(1, [1]))
    plan = steps.next_plan()
    assert plan is not None
    assert plan.layerwise_load is load
    assert plan.shape.is_decode == (not is_loading)
