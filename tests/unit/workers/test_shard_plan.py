"""Every strategy partitions every batch exactly, can be joined again, and balances according to its formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.spec.strategy import Strategy
from workers.attention.runs import Run
from workers.context_parallel.shard_plan import STRATEGIES, ShardPlan, make_shard_plan

requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=6)
plans = st.builds(
    lambda strategy, lens, cp: make_shard_plan(strategy, [e for e, _ in lens], [p for _, p in lens], cp),
    st.sampled_from(Strategy),
    requests,
    st.integers(1, 5),
)
split_plans = plans.filter(lambda plan: not plan.is_replicated)


def positions(run: Run) -> list[int]:
    return [run.first_position + j * run.step for j in range(run.count)]


def work(plan: ShardPlan) -> list[int]:
    """Return the number of keys seen by each rank's queries."""
    return [sum(position + 1 for run in runs for position in positions(run)) for runs in plan.runs]


def imbalance(plan: ShardPlan) -> float:
    return max(work(plan)) * plan.cp / sum(work(plan))


def test_every_strategy_is_registered() -> None:
    assert set(STRATEGIES) == set(Strategy)


@settings(deadline=None)
@given(split_plans)
def test_every_token_has_exactly_one_rank(plan: ShardPlan) -> None:
    locals_ = [plan.local(cp_rank) for cp_rank in range(plan.cp)]
    assert sorted(np.concatenate(locals_)) == list(range(plan.num_tokens))
    assert tuple(map(len, locals_)) == plan.lens
    assert max(plan.lens) == plan.padded_len


@settings(deadline=None)
@given(plans.filter(lambda plan: plan.is_replicated))
def test_a_replicated_plan_gives_every_rank_the_batch_as_it_is(plan: ShardPlan) -> None:
    everything = list(range(plan.num_tokens))
    assert all(list(plan.local(cp_rank)) == everything for cp_rank in range(plan.cp))
    assert list(plan.gathered_index) == everything == list(plan.inverse)


@settings(deadline=None)
@given(split_plans)
def test_joining_a_split_batch_restores_it(plan: ShardPlan) -> None:
    batch = np.random.default_rng(0).integers(0, 1 << 30, plan.num_tokens)
    padded = [np.full(plan.padded_len, -7) for _ in range(plan.cp)]
    for cp_rank, buffer in enumerate(padded):
        buffer[: plan.lens[cp_rank]] = batch[plan.local(cp_rank)]
    gathered = np.concatenate(padded)
    np.testing.assert_array_equal(gathered[plan.inverse], batch)
    np.testing.assert_array_equal(gathered, np.append(batch, -7)[plan.gathered_index])


@settings(deadline=None)
@given(plans)
def test_runs_name_the_positions_of_the_local_tokens_in_order(plan: ShardPlan) -> None:
    flattened = [
        (request, prefix + j)
        for request, (length, prefix) in enumerate(zip(plan.extend_lens, plan.prefix_lens, strict=True))
        for j in range(length)
    ]
    for cp_rank, runs in enumerate(plan.runs):
        named = [(run.request, position) for run in runs for position in positions(run)]
        assert named == [flattened[token] for token in plan.local(cp_rank)]
        assert all(run.count > 0 for run in runs)
        assert all(run.last_position == positions(run)[-1] for run in runs)


@settings(deadline=None)
@given(split_plans)
def test_all_causal_pairs_are_covered_once(plan: ShardPlan) -> None:
    pairs = [
        length * prefix + length * (length + 1) // 2
        for length, prefix in zip(plan.extend_lens, plan.prefix_lens, strict=True)
    ]
    assert sum(work(plan)) == sum(pairs)


@settings(deadline=None)
@given(split_plans)
def test_a_token_is_where_it_is_located(plan: ShardPlan) -> None:
    for token in range(plan.num_tokens):
        location = plan.locate(token)
        assert plan.local(location.cp_rank)[location.row] == token


def test_last_tokens_by_hand() -> None:
    plan = make_shard_plan(Strategy.CONTIGUOUS, [4, 1, 3], [0, 9, 2], 2)
    assert [plan.last_token(request) for request in range(3)] == [3, 4, 7]
    assert [plan.locate(plan.last_token(request)) for request in range(3)] == [(1, 1), (0, 2), (1, 2)]


def test_zigzag_by_hand() -> None:
    plan = make_shard_plan(Strategy.ZIGZAG, [10], [5], 2)
    assert plan.runs == ((Run(0, 5, 3, 1), Run(0, 13, 2, 1)), (Run(0, 8, 5, 1),))
    assert list(plan.gathered_index) == [0, 1, 2, 8, 9, 3, 4, 5, 6, 7]


def test_interleave_by_hand() -> None:
    plan = make_shard_plan(Strategy.INTERLEAVE, [4, 1, 3], [0, 9, 2], 3)
    assert plan.runs == (
        (Run(0, 0, 2, 3), Run(2, 3, 1, 1)),
        (Run(0, 1, 1, 1), Run(1, 9, 1, 1), Run(2, 4, 1, 1)),
        (Run(0, 2, 1, 1), Run(2, 2, 1, 1)),
    )


@settings(deadline=None)
@given(requests, st.integers(2, 5))
def test_interleave_distributes_the_flattened_batch_in_rotation(lens: list[tuple[int, int]], cp: int) -> None:
    plan = make_shard_plan(Strategy.INTERLEAVE, [e for e, _ in lens], [p for _, p in lens], cp)
    for cp_rank in range(cp):
        assert list(plan.local(cp_rank)) == list(range(cp_rank, plan.num_tokens, cp))


@settings(deadline=None)
@given(requests, st.integers(2, 5))
def test_whole_request_never_splits_and_is_unbalanced_by_at_most_one_request(
    lens: list[tuple[int, int]], cp: int
) -> None:
    plan = make_shard_plan(Strategy.WHOLE_REQUEST, [e for e, _ in lens], [p for _, p in lens], cp)
    assert all(run.count == plan.extend_lens[run.request] for runs in plan.runs for run in runs)
    heaviest = max((e * p + e * (e + 1) // 2 for e, p in lens), default=0)
    assert max(work(plan)) - min(work(plan)) <= heaviest


def test_whole_request_takes_the_longest_first() -> None:
    plan = make_shard_plan(Strategy.WHOLE_REQUEST, [3, 9, 3, 4], [0, 0, 0, 0], 2)
    assert [{run.request for run in runs} for runs in plan.runs] == [{1}, {0, 2, 3}]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 500), st.integers(2, 8))
def test_zigzag_is_exactly_balanced_when_its_segments_are_equal(segment: int, prefix: int, cp: int) -> None:
    assert len(set(work(make_shard_plan(Strategy.ZIGZAG, [2 * cp * segment], [prefix], cp)))) == 1


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(0, 500), st.integers(2, 8))
def test_zigzag_differs_by_at_most_one_token_a_segment(length: int, prefix: int, cp: int) -> None:
    loads = work(make_shard_plan(Strategy.ZIGZAG, [length], [prefix], cp))
    assert max(loads) - min(loads) <= 2 * (prefix + length)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 500), st.integers(2, 8))
def test_interleave_and_contiguous_are_as_unbalanced_as_their_formulas_say(share: int, prefix: int, cp: int) -> None:
    length = share * cp
    interleave = make_shard_plan(Strategy.INTERLEAVE, [length], [prefix], cp)
    assert imbalance(interleave) == pytest.approx(1 + (cp - 1) / (2 * prefix + length + 1))
    contiguous = make_shard_plan(Strategy.CONTIGUOUS, [length], [prefix], cp)
    mean_visible = prefix + (length + 1) / 2
    assert imbalance(contiguous) == pytest.approx(1 + length / 2 * (1 - 1 / cp) / mean_visible)


@settings(deadline=None)
@given(st.sampled_from([Strategy.ZIGZAG, Strategy.CONTIGUOUS, Strategy.INTERLEAVE]), st.integers(2, 5))
def test_a_request_shorter_than_the_group_leaves_ranks_without_a_run(strategy: Strategy, cp: int) -> None:
    plan = make_shard_plan(strategy, [cp - 1], [3], cp)
    assert sorted(map(len, plan.runs)) == [0] + [1] * (cp - 1)
    assert plan.padded_len == 1


def test_an_empty_batch_is_a_plan_too() -> None:
    for strategy in Strategy:
        plan = make_shard_plan(strategy, [], [], 3)
        assert (plan.num_tokens, plan.padded_len, len(plan.inverse)) == (0, 0, 0)
