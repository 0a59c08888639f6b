"""Priority order of requests, the budget of a step, and sizes of chunks and steps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import Room
from workers.context_parallel.chunk_sizes import efficient_share, even_chunk, slowest
from workers.context_parallel.cost_model import ModelShape, Rates
from workers.scheduler.step_budget import WINDOW, Budget, precedence

CHUNK = 64
SHAPE = ModelShape(
    num_layers=8,
    linear_flops=6_300_000,
    kv_flops=524_288,
    attention_flops=2048,
    partial_row_bytes=2048,
    kv_row_bytes=1024,
    q_row_bytes=2048,
)


def order(sequences: list[tuple[int, int, int]]) -> list[int]:
    """Return the arrivals in scheduling order, from (priority, prefix, pending)."""
    ranks = [
        precedence(
            priority=priority, arrival_number=arrival, prefix_len=prefix, pending_len=pending, chunk_tokens=CHUNK
        ).sort_key
        for arrival, (priority, prefix, pending) in enumerate(sequences)
    ]
    assert len(set(ranks)) == len(ranks)
    return sorted(range(len(ranks)), key=ranks.__getitem__)


def test_equal_priorities_keep_arrival_order() -> None:
    assert order([(0, 0, 10)] * 100) == list(range(100))
    # Lengths with the same power of two in steps are equal.
    assert order([(0, 0, 60), (0, 0, 5), (0, 0, 64)]) == [0, 1, 2]
    assert order([(0, 0, 3 * CHUNK), (0, 0, 2 * CHUNK)]) == [0, 1]


def test_order_is_by_priority_then_work_then_prefix() -> None:
    assert order([(1, 50, 1), (0, 0, 1000)]) == [1, 0]
    assert order([(0, 5000, 2 * CHUNK), (0, 0, CHUNK)]) == [1, 0]
    assert order([(0, 0, CHUNK), (0, 8, CHUNK), (0, 4, CHUNK)]) == [1, 2, 0]


@given(num_steps=st.integers(1, 2000), age_steps=st.integers(0, 10**7))
def test_waiting_moves_a_long_prompt_up_but_not_before_those_of_one_step(num_steps: int, age_steps: int) -> None:
    def work(age_steps: int) -> int:
        pending_len = num_steps * CHUNK
        aged = precedence(
            priority=0, arrival_number=0, prefix_len=0, pending_len=pending_len, chunk_tokens=CHUNK, age_steps=age_steps
        )
        assert aged.length == num_steps.bit_length()
        return aged.sort_key[1]

    assert work(age_steps) <= work(age_steps // 2)
    assert work(0) == num_steps.bit_length()
    assert work(2 * num_steps * num_steps) == min(num_steps, 2)


@given(prefixes=st.lists(st.integers(0, 500), max_size=4 * WINDOW))
def test_a_longer_prefix_overtakes_fewer_than_a_window(prefixes: list[int]) -> None:
    turns = order([(0, prefix, 10) for prefix in prefixes])
    for index, arrival in enumerate(turns):
        assert sum(later > arrival for later in turns[:index]) < WINDOW


@given(
    num_tokens=st.integers(1, 200),
    num_rows=st.integers(1, 6),
    share=st.floats(0.01, 1.0),
    wants=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 100)), min_size=1, max_size=10),
    shrinks=st.booleans(),
)
def test_a_budget_is_used_up_and_never_exceeded(
    num_tokens: int, num_rows: int, share: float, wants: list[tuple[int, int]], shrinks: bool
) -> None:
    def chunk(prefix_len: int) -> int:
        return max(1, num_tokens - prefix_len) if shrinks else 2 * num_tokens

    budget = Budget(num_tokens, num_rows, chunk)
    first_prefix, first_wanted = wants[0]
    budget.grant_share(Room(0), first_prefix, first_wanted, share)
    assert 1 <= budget.granted[Room(0)] <= first_wanted
    assert budget.granted[Room(0)] <= max(1, share * min(num_tokens, chunk(first_prefix)))
    for number, (prefix, wanted) in enumerate(wants):
        budget.grant(Room(number), prefix, wanted)
    granted = list(budget.granted.values())
    assert len(granted) <= num_rows
    assert sum(granted) <= num_tokens
    spent = sum(count / chunk(wants[room][0]) for room, count in budget.granted.items())
    assert spent <= 1 + 1e-9
    if not shrinks:
        reached = [wanted for _, wanted in wants[:num_rows]]
        assert sum(granted) == min(num_tokens, sum(reached))


@given(
    wants=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 100)), min_size=1, max_size=10),
    max_context_tokens=st.integers(1, 500),
    share=st.floats(0.01, 1.0),
)
def test_requests_together_see_no_more_than_one_may(
    wants: list[tuple[int, int]], max_context_tokens: int, share: float
) -> None:
    """One request always runs, and so does every other request that still fits."""
    budget = Budget(200, 20, lambda _: 200, max_context_tokens)
    budget.grant_share(Room(0), *wants[0], share)
    assert budget.granted[Room(0)] >= 1
    for number, (prefix, wanted) in enumerate(wants):
        budget.grant(Room(number), prefix, wanted)
    seen = sum(wants[room][0] + count for room, count in budget.granted.items())
    assert seen <= max_context_tokens or len(budget.granted) == 1
    used_up = sum(budget.granted.values()) == 200
    for number, (prefix, _) in enumerate(wants):
        assert used_up or Room(number) in budget.granted or seen + prefix + 1 > max_context_tokens


@given(
    cp=st.integers(1, 8),
    chunk_tokens=st.integers(1, 20_000),
    prefix_len=st.integers(0, 2_000_000),
    attention_flops=st.integers(1, 10**6),
    pp=st.integers(1, 3),
    window=st.integers(1, 30_000),
)
def test_an_even_chunk_takes_equally_long_after_any_prefix(
    cp: int, chunk_tokens: int, prefix_len: int, attention_flops: int, pp: int, window: int
) -> None:
    windows = (window, 3), (2 * window, 5)
    shape, rates = replace(SHAPE, attention_flops=attention_flops, windows=windows), Rates()
    chunk = even_chunk(shape, rates, cp, chunk_tokens, pp)

    def work_s(count: float, prefix: int) -> float:
        linear_s = count * (shape.linear_flops / rates.linear_flops_per_s / cp + rates.row_s)
        pairs = count * prefix + count * count / 2
        for tokens, num_layers in windows:
            pairs -= (max(0, prefix + count - tokens) ** 2 - max(0, prefix - tokens) ** 2) / 2 * num_layers / 8
        return shape.num_layers * (linear_s + pairs * attention_flops / rates.attention_flops_per_s / cp)

    full_s = work_s(chunk_tokens, 0)
    if pp == 1:
        full_s = max(full_s, 20 * (rates.step_s + 8 * (rates.run_s + rates.exchange_s)))
    count = chunk(prefix_len)
    # More tokens than fit into a step would make the first steps shorter than the later ones.
    assert chunk(0) == chunk_tokens or (pp == 1 and chunk(0) > chunk_tokens)
    assert count == 1 or work_s(count - 0.51, prefix_len) <= full_s * (1 + 1e-9)
    assert work_s(count + 0.51, prefix_len) >= full_s * (1 - 1e-9)
    if window >= max(prefix_len + count, chunk_tokens):
        assert count == even_chunk(replace(shape, windows=()), rates, cp, chunk_tokens, pp)(prefix_len)


@given(cp=st.integers(1, 8), chunk_tokens=st.integers(1, 20_000), step_s=st.floats(0.0, 1.0))
def test_fixed_costs_are_a_twentieth_of_an_efficient_step(cp: int, chunk_tokens: int, step_s: float) -> None:
    rates = Rates(step_s=step_s)
    linear_s = chunk_tokens * (SHAPE.linear_flops / rates.linear_flops_per_s / cp + rates.row_s)
    pairs_s = chunk_tokens**2 / 2 * SHAPE.attention_flops / rates.attention_flops_per_s / cp
    fixed_s = step_s + SHAPE.num_layers * (rates.run_s + rates.exchange_s)
    share = efficient_share(SHAPE, rates, cp, chunk_tokens)
    assert share == pytest.approx(min(1.0, 20 * fixed_s / (SHAPE.num_layers * (linear_s + pairs_s))))


def test_an_efficient_step_takes_as_long_as_the_transfers_that_it_hides() -> None:
    shape = replace(SHAPE, weight_bytes=100_000_000)
    exposed, hidden = (Rates(step_s=0.0, run_s=0.0, exchange_s=0.0, hidden_share=share) for share in (0.0, 1.0))
    weights_s = shape.num_layers * shape.weight_bytes / hidden.exchange_bytes_per_s
    chunk_s = weights_s / efficient_share(shape, hidden, 2, 20_000)
    assert efficient_share(shape, exposed, 2, 20_000) == pytest.approx(min(1.0, 20 * weights_s / chunk_s))
    assert weights_s < chunk_s


@given(
    layers=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    speeds=st.lists(st.floats(1e9, 1e13), min_size=4, max_size=4),
    cp=st.integers(1, 8),
    num_tokens=st.integers(1, 8192),
)
def test_no_rank_has_more_layers_and_is_slower_at_each_than_the_slowest(
    layers: list[int], speeds: list[float], cp: int, num_tokens: int
) -> None:
    reported = [
        (replace(SHAPE, num_layers=count), Rates(linear_flops_per_s=speed))
        for count, speed in zip(layers, speeds, strict=False)
    ]
    shape, rates = slowest(reported, cp, num_tokens)
    for other_shape, other_rates in reported:
        slower = other_shape.num_layers > shape.num_layers and other_rates.linear_flops_per_s < rates.linear_flops_per_s
        assert not slower


def test_the_stage_with_one_layer_more_is_the_slowest() -> None:
    stages = [(replace(SHAPE, num_layers=count), Rates()) for count in (8, 9, 8)]
    assert slowest(stages, 2, 512) == stages[1]
