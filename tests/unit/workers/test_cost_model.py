"""The cost model: more work never takes less time, balanced strategies win for much work, `none` for little."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.config import ParallelConfig
from cluster.spec.step_messages import ScheduledRequest
from cluster.spec.strategy import CpMode, MoeDispatch, Passing, PassingSetting, Strategy, StrategySetting
from tests.fakes.steps import requests_of
from workers.attention.runs import Run
from workers.context_parallel import cost_model, strategy_chooser
from workers.context_parallel.chunk_sizes import even_chunk
from workers.context_parallel.cost_model import TILE, ModelShape, Rates, computed_pairs, estimate_step_s
from workers.context_parallel.shard_plan import ShardPlan, make_shard_plan, make_step_shape
from workers.context_parallel.strategy_chooser import MIN_GAIN, StrategyChoice, StrategyChooser, undivided
from workers.expert_parallel.dispatch_cost import BlockShape, ExpertExchange

SHAPE = ModelShape(
    num_layers=8,
    linear_flops=6_300_000,
    kv_flops=524_288,
    attention_flops=2048,
    kv_row_bytes=1024,
    q_row_bytes=1024,
    partial_row_bytes=2048,
)
EXPERTS = ExpertExchange(
    block=BlockShape.of(ParallelConfig(cp=8, ep=8), top_k=2, reach=1.0),
    dp=1,
    dispatch=MoeDispatch.GATHER,
    waits_for_counts=False,
    row_bytes=0,
    sum_bytes=0,
)
"""Experts on eight ranks, with tokens too small to take time to send."""
RATES = Rates()
PASSINGS = st.none() | st.sampled_from(Passing)
LENS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=6)


def estimate(
    strategy: Strategy,
    extends: list[int],
    prefixes: list[int],
    cp: int,
    rates: Rates = RATES,
    shape: ModelShape = SHAPE,
    passing: Passing | None = None,
) -> float:
    return estimate_step_s(make_shard_plan(strategy, extends, prefixes, cp), shape, rates, passing)


def choose(scheduled: list[ScheduledRequest], cp: int) -> StrategyChoice:
    return StrategyChooser(setting=StrategySetting.AUTO, cp=cp, shape=SHAPE, rates=RATES)(scheduled)


@given(st.integers(0, 50), st.integers(1, 2 * TILE), st.integers(1, 5))
def test_a_triangle_smaller_than_a_tile_costs_a_square(first: int, count: int, step: int) -> None:
    in_vain = computed_pairs(Run(0, first, count, step)) - Run(0, first, count, step).num_pairs
    assert 0 <= in_vain <= step * count * TILE / 2
    if step == 1 and first == 0 and count <= TILE:
        assert Run(0, 0, count, 1).num_pairs + in_vain == count * count


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 5), st.integers(1, 99))
def test_pairs_are_counted_query_by_query(first: int, count: int, step: int, window: int) -> None:
    run, seen = Run(0, first, count, step), [first + index * step + 1 for index in range(count)]
    assert run.num_pairs == sum(seen)
    outside, in_vain = sum(max(0, keys - window) for keys in seen), computed_pairs(run) - run.num_pairs
    assert cost_model.skipped_pairs(run, window) == max(0, outside - in_vain)


@given(st.sampled_from(Strategy), st.integers(1, 5), st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 3000))
def test_a_window_bounds_the_cost_of_a_prefix(strategy: Strategy, cp: int, new: int, prefix: int, window: int) -> None:
    def windowed_s(new: int, prefix: int, tokens: int = window, cp: int = cp) -> float:
        shape = dataclasses.replace(SHAPE, windows=((tokens, SHAPE.num_layers),))
        return estimate(strategy, [new], [prefix], cp, shape=shape)

    longest_s = windowed_s(new, window + prefix)
    assert windowed_s(new, prefix) <= windowed_s(new, prefix + 1) <= windowed_s(new, window) == longest_s
    assert windowed_s(new, prefix, cp=1) <= windowed_s(new + 1, prefix, cp=1)
    assert windowed_s(new, prefix, new + prefix) == estimate(strategy, [new], [prefix], cp)


@given(
    st.sampled_from(Strategy),
    PASSINGS,
    st.integers(1, 5),
    LENS,
    st.integers(0, 5),
    st.integers(1, 999),
    st.booleans(),
)
def test_more_tokens_never_take_less_time(
    strategy: Strategy,
    passing: Passing | None,
    cp: int,
    lens: list[tuple[int, int]],
    at: int,
    more: int,
    longer_prefix: bool,
) -> None:
    extends, prefixes = [extend for extend, _ in lens] or [1], [prefix for _, prefix in lens] or [0]
    before_s = estimate(strategy, extends, prefixes, cp, passing=passing)
    grown = prefixes if longer_prefix else extends
    grown[at % len(grown)] += more
    # Whole requests are distributed greedily, which is within 4/3 of the optimum and can jump within this range.
    slack = 4 / 3 if strategy is Strategy.WHOLE_REQUEST else 1.0
    run_of_its_own_s = 2 * cp * (2 * cp + 1) * SHAPE.num_layers * RATES.run_s
    assert estimate(strategy, extends, prefixes, cp, passing=passing) * slack + run_of_its_own_s >= before_s


@pytest.mark.parametrize(
    ("strategy", "new", "tokens", "is_expanded"),
    [
        (Strategy.NONE, 1, 1, False),
        (Strategy.NONE, 100, 100, False),  # takes longer, but needs fewer FLOPs
        (Strategy.NONE, 200, 200, True),
        (Strategy.ZIGZAG, 400, 200, True),
    ],
)
def test_keys_are_expanded_if_that_takes_fewer_flops(
    strategy: Strategy, new: int, tokens: int, is_expanded: bool
) -> None:
    """Every rank expands all keys that its queries see, except as many as the linear work already counts."""
    shape = dataclasses.replace(SHAPE, expand_flops=10**6, stored_pair_flops=4 * SHAPE.attention_flops)
    added_s = estimate(strategy, [new], [1000], 2, shape=shape) - estimate(strategy, [new], [1000], 2)
    expand_s = (1000 + new - tokens) * 1e6 / RATES.linear_flops_per_s
    stored_flops = 3 * SHAPE.attention_flops * computed_pairs(Run(0, 1000, new, 1))
    stored_s = stored_flops / RATES.attention_flops_per_s
    assert added_s == pytest.approx((SHAPE.num_layers - 1) * (expand_s if is_expanded else stored_s))


SELECTING = dataclasses.replace(SHAPE, top_k=1000, stored_pair_flops=3 * SHAPE.attention_flops, index_flops=300)


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 5), st.integers(1, 99))
def test_selected_pairs_are_counted_query_by_query(first: int, count: int, step: int, top_k: int) -> None:
    run = Run(0, first, count, step)
    used = [min(first + index * step + 1, top_k) for index in range(count)]
    assert run.num_pairs - run.pairs_beyond(top_k) == sum(used)


@given(st.sampled_from(Strategy), PASSINGS, st.integers(1, 5), st.integers(1, 1000))
def test_selection_costs_nothing_while_a_query_may_use_all_keys(
    strategy: Strategy, passing: Passing | None, cp: int, new: int
) -> None:
    shape = dataclasses.replace(SELECTING, top_k=None, index_flops=0)
    same_s = estimate(strategy, [new], [1000 - new], cp, shape=shape, passing=passing)
    assert estimate(strategy, [new], [1000 - new], cp, shape=SELECTING, passing=passing) == same_s


def test_later_keys_are_only_scored() -> None:
    """Check 2000 queries that score up to 101,000 keys and use 1000 of them."""
    added_s = [estimate(Strategy.NONE, [2000], [prefix], 1, shape=SELECTING) for prefix in (98_000, 99_000)]
    scored_s = (SHAPE.num_layers - 1) * 2000 * 1000 * 300 / RATES.attention_flops_per_s
    assert added_s[1] - added_s[0] == pytest.approx(scored_s)


def test_chunks_that_select_keys_take_equally_long_after_any_prefix() -> None:
    rates = dataclasses.replace(RATES, step_s=0.0, run_s=0.0, exchange_s=0.0)
    chunk = even_chunk(SELECTING, rates, 1, 8192)
    times_s = [
        estimate(Strategy.NONE, [chunk(prefix)], [prefix], 1, rates, SELECTING) for prefix in (0, 999, 50_000, 500_000)
    ]
    assert times_s == pytest.approx([times_s[0]] * 4, rel=0.01)
    assert chunk(500_000) > 3 * even_chunk(SHAPE, rates, 1, 8192)(500_000)


@given(PASSINGS, st.integers(2, 5))
def test_ranks_share_the_work_of_selection(passing: Passing | None, cp: int) -> None:
    rates = dataclasses.replace(RATES, exchange_s=0.0, exchange_bytes_per_s=1e18, row_s=0.0, merge_row_s=0.0, run_s=0.0)
    whole_s = estimate(Strategy.NONE, [60_000], [0], 1, rates, SELECTING) - rates.step_s
    shared_s = estimate(Strategy.ZIGZAG, [60_000], [0], cp, rates, SELECTING, passing) - rates.step_s
    assert shared_s == pytest.approx(whole_s / cp, rel=0.2)


def test_tp_ranks_pay_for_two_sums_a_layer_by_their_own_tokens() -> None:
    rates = dataclasses.replace(RATES, all_reduce_s=1e-3, all_reduce_row_s=1e-5)
    for strategy, num_own in {Strategy.NONE: 64, Strategy.ZIGZAG: 16}.items():
        added_s = estimate(strategy, [64], [0], 4, rates) - estimate(strategy, [64], [0], 4)
        assert added_s == pytest.approx(SHAPE.num_layers * 2e-3 + (SHAPE.num_layers - 1) * 2 * num_own * 1e-5)


@given(
    st.sampled_from(Strategy),
    st.integers(1, 5),
    LENS,
    st.sampled_from([field.name for field in dataclasses.fields(Rates) if field.name != "hidden_share"]),
    PASSINGS,
)
def test_a_slower_part_never_makes_a_step_faster(
    strategy: Strategy, cp: int, lens: list[tuple[int, int]], name: str, passing: Passing | None
) -> None:
    factor = 0.5 if name.endswith("_per_s") else 2.0
    slower = dataclasses.replace(RATES, **{name: factor * getattr(RATES, name)})
    extends, prefixes = [extend for extend, _ in lens], [prefix for _, prefix in lens]
    before_s = estimate(strategy, extends, prefixes, cp, passing=passing)
    assert estimate(strategy, extends, prefixes, cp, slower, passing=passing) >= before_s


@given(st.integers(4096, 200_000), st.integers(0, 4096), st.integers(2, 8))
def test_contiguous_is_worse_than_zigzag_for_long_prompts(length: int, prefix: int, cp: int) -> None:
    zigzag_s = estimate(Strategy.ZIGZAG, [length], [prefix], cp)
    assert estimate(Strategy.CONTIGUOUS, [length], [prefix], cp) > zigzag_s
    assert choose(requests_of([length], [prefix]), cp).shape.strategy in (Strategy.ZIGZAG, Strategy.INTERLEAVE)
    assert zigzag_s < estimate(Strategy.NONE, [length], [prefix], cp) * 1.5 / cp


def test_attention_alone_puts_contiguous_where_its_formula_does() -> None:
    """The second of two ranks has 3/4 of the causal pairs, so the efficiency is 2/3, apart from partly masked tiles."""
    free = Rates(step_s=0, linear_flops_per_s=1e30, run_s=0, row_s=0, merge_row_s=0, exchange_s=0)
    free = dataclasses.replace(free, exchange_bytes_per_s=1e30)
    alone_s = estimate(Strategy.NONE, [1 << 16], [0], 1, free)
    assert alone_s / (2 * estimate(Strategy.CONTIGUOUS, [1 << 16], [0], 2, free)) == pytest.approx(2 / 3, rel=3e-3)
    assert alone_s / (2 * estimate(Strategy.ZIGZAG, [1 << 16], [0], 2, free)) == pytest.approx(1, rel=3e-3)


@given(st.integers(1, 4), st.integers(2, 8))
def test_none_is_best_for_very_short_prompts(length: int, cp: int) -> None:
    assert choose(requests_of([length], [0]), cp).shape.strategy is Strategy.NONE


@given(LENS, st.integers(1, 8))
def test_an_automatic_choice_is_never_slower_than_no_division(lens: list[tuple[int, int]], cp: int) -> None:
    extends, prefixes = [extend for extend, _ in lens], [prefix for _, prefix in lens]
    choice = choose(requests_of(extends, prefixes), cp)
    strategies = Strategy if cp > 1 else (Strategy.NONE,)
    estimates_s = {strategy: estimate(strategy, extends, prefixes, cp) for strategy in strategies}
    undivided_s = estimates_s[Strategy.NONE]
    assert choice.estimate_s == estimates_s[choice.shape.strategy] <= undivided_s
    assert choice.shape.strategy is Strategy.NONE or choice.estimate_s <= undivided_s * (1 - MIN_GAIN)
    assert choice.estimate_s <= min(estimates_s.values()) / (1 - MIN_GAIN)


@pytest.mark.parametrize(("divided_s", "is_undivided"), [(0.985, True), (0.975, False)])
def test_an_exchange_must_save_two_percent(
    monkeypatch: pytest.MonkeyPatch, *, divided_s: float, is_undivided: bool
) -> None:
    def estimate_s(plan: ShardPlan, *_: object) -> float:
        return 1.0 if plan.is_replicated else divided_s

    monkeypatch.setattr(strategy_chooser, "estimate_step_s", estimate_s)
    assert (choose(requests_of([100], [0]), 2).shape.strategy is Strategy.NONE) == is_undivided


@given(st.sampled_from(StrategySetting), LENS)
def test_one_rank_never_divides(setting: StrategySetting, lens: list[tuple[int, int]]) -> None:
    chooser = StrategyChooser(setting=setting, cp=1, shape=SHAPE, rates=RATES)
    choice = chooser(requests_of([extend for extend, _ in lens], [prefix for _, prefix in lens]))
    assert choice.shape.strategy is Strategy.NONE


@pytest.mark.parametrize("strategy", Strategy)
def test_a_forced_strategy_is_obeyed_and_estimated(strategy: Strategy) -> None:
    chooser = StrategyChooser(setting=StrategySetting(strategy.value), cp=3, shape=SHAPE, rates=RATES)
    choice = chooser(requests_of([1, 9000], [0, 7]))
    assert choice.shape.strategy is strategy
    assert choice.estimate_s == estimate(strategy, [1, 9000], [0, 7], 3)


def test_many_equal_requests_are_not_sharded() -> None:
    """Two runs of each request on each rank cost more than the balance gains."""
    choice = choose(requests_of([64] * 64, [0] * 64), 4)
    assert choice.shape.strategy is Strategy.WHOLE_REQUEST


def test_every_strategy_can_be_requested() -> None:
    assert StrategySetting.AUTO.candidates == tuple(Strategy)
    assert [setting.candidates for setting in StrategySetting][1:] == [(strategy,) for strategy in Strategy]


def test_an_undivided_step_has_no_estimate() -> None:
    scheduled = requests_of([5], [0])
    assert undivided(scheduled) == StrategyChoice(make_step_shape(scheduled), None)


@pytest.mark.parametrize("passing", [None, *Passing])
def test_an_exchange_behind_work_is_free_as_far_as_it_can_be_hidden(passing: Passing | None) -> None:
    costs = [
        estimate(Strategy.ZIGZAG, [9000], [4000], 4, dataclasses.replace(RATES, hidden_share=share), passing=passing)
        for share in (0.1, 0.5, 1.0)
    ]
    free = dataclasses.replace(RATES, exchange_s=0.0, exchange_bytes_per_s=1e30, hidden_share=1.0)
    free_s = estimate(Strategy.ZIGZAG, [9000], [4000], 4, free, passing=passing)
    assert costs[0] > costs[1] > costs[2] >= free_s
    assert costs[2] - RATES.exchange_s == pytest.approx(free_s, rel=5e-3)


@pytest.mark.parametrize("strategy", [Strategy.NONE, Strategy.ZIGZAG])
def test_weights_of_other_ranks_delay_a_step_as_far_as_no_work_hides_them(strategy: Strategy) -> None:
    shape = dataclasses.replace(SHAPE, weight_bytes=5_000_000)
    layer_s = RATES.exchange_s + 5_000_000 / RATES.exchange_bytes_per_s

    def added_s(num_tokens: int, rates: Rates) -> float:
        with_weights, without = (estimate(strategy, [num_tokens], [0], 2, rates, each) for each in (shape, SHAPE))
        return with_weights - without

    hidden = dataclasses.replace(RATES, hidden_share=1.0)
    assert added_s(9000, RATES) == pytest.approx(SHAPE.num_layers * layer_s)
    # Nothing hides transfers in the last layer.
    assert added_s(9000, hidden) == pytest.approx(layer_s)
    assert layer_s < added_s(20, hidden) <= SHAPE.num_layers * layer_s


@pytest.mark.parametrize("experts", [None, EXPERTS])
@pytest.mark.parametrize("passing", [None, Passing.PASS_KV])
def test_weights_have_a_whole_layer_to_arrive(passing: Passing | None, experts: ExpertExchange | None) -> None:
    """Other ranks' weights arrive while keys circulate among many ranks, and while experts compute."""
    shape = dataclasses.replace(SHAPE, expert_flops=6_000_000, expert_share=1.0, experts=experts)
    rates = dataclasses.replace(RATES, exchange_s=0.0, exchange_bytes_per_s=1e10, hidden_share=1.0)

    def step_s(weights_s: float) -> float:
        weights = dataclasses.replace(shape, weight_bytes=round(weights_s * rates.exchange_bytes_per_s))
        return estimate(Strategy.ZIGZAG, [9000], [0], 8, rates, weights, passing)

    weights_s = 0.8 * step_s(0.0) / SHAPE.num_layers
    # Nothing hides transfers in the last layer.
    assert step_s(weights_s) - step_s(0.0) == pytest.approx(weights_s)
    assert step_s(10 * weights_s) > 10 * weights_s * SHAPE.num_layers


def test_communication_that_is_not_overlapped_uses_one_call() -> None:
    unmerged = dataclasses.replace(RATES, merge_row_s=1.0)
    assert estimate(Strategy.ZIGZAG, [9000], [0], 2, unmerged) < 10
    overlapped = dataclasses.replace(unmerged, hidden_share=0.1)
    assert estimate(Strategy.ZIGZAG, [9000], [0], 2, overlapped) > 9000


def test_each_passing_is_estimated_cheaper_where_it_moves_less() -> None:
    """First few queries with a long prefix, then many without one. Queries and KV of a token have equal sizes here."""
    few = {passing: estimate(Strategy.ZIGZAG, [64], [60_000], 4, passing=passing) for passing in Passing}
    many = {passing: estimate(Strategy.ZIGZAG, [30_000], [30_000], 4, passing=passing) for passing in Passing}
    assert few[Passing.PASS_Q] < few[Passing.PASS_KV]
    assert many[Passing.PASS_KV] < many[Passing.PASS_Q]


@pytest.mark.parametrize("setting", PassingSetting)
def test_a_passing_is_chosen_only_in_ring_mode(setting: PassingSetting) -> None:
    def chosen(mode: CpMode, cp: int, rates: Rates = RATES) -> Passing | None:
        chooser = StrategyChooser(
            setting=StrategySetting.AUTO, cp=cp, shape=SHAPE, rates=rates, mode=mode, passing=setting
        )
        return chooser(requests_of([5], [5000])).shape.passing

    assert chosen(CpMode.GATHER, 4) is chosen(CpMode.RING, 1) is None
    if setting is PassingSetting.AUTO:
        slow_links = dataclasses.replace(RATES, exchange_bytes_per_s=1e6)
        assert chosen(CpMode.RING, 4, slow_links) is Passing.PASS_Q
    else:
        assert chosen(CpMode.RING, 4) is Passing(setting)
