"""Priority order of requests, the budget of a step, and bounds on waiting times."""

from dataclasses import replace
from itertools import count
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from tests.fakes.prefill_steps import PAGE_SIZE, PrefillSteps
from workers.context_parallel.cost_model import ModelShape, Rates, efficient_share, even_chunk, slowest
from workers.scheduler.step_budget import WINDOW, Budget, precedence
from workers.scheduler.waiting import LOOKAHEAD

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


SHARE = 16
"""Tokens per step for the oldest sequences, with the default share of PrefillSteps."""
LENGTHS = 3
"""Number of powers of two in the steps of prompts with up to 200 tokens."""

prompts = st.lists(st.tuples(st.integers(1, 200), st.integers(-3, 3)), min_size=1, max_size=6)


@given(prompts=prompts, rivals=st.lists(st.tuples(st.integers(1, 200), st.integers(-9, 9)), min_size=1, max_size=6))
def test_earlier_work_bounds_the_end_regardless_of_later_arrivals(
    prompts: list[tuple[int, int]], rivals: list[tuple[int, int]]
) -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK, max_requests=4)
    rooms = [steps.add(length, priority) for length, priority in prompts]
    bound = 0
    for room, (length, _) in zip(rooms, prompts, strict=True):
        bound += -(-length // (SHARE // LENGTHS))
        while room not in steps.ended:
            if steps.steps.num_waiting <= len(rivals):
                for rival_length, rival_priority in rivals:
                    steps.add(rival_length, rival_priority)
            steps.run_step()
            assert steps.num_steps <= bound


@given(prompts=prompts, chunk_tokens=st.integers(8, 80))
def test_every_step_is_full_but_the_last(prompts: list[tuple[int, int]], chunk_tokens: int) -> None:
    steps = PrefillSteps(chunk_tokens=chunk_tokens)
    for length, priority in prompts:
        steps.add(length, priority)
    steps.run()
    assert steps.num_steps == -(-sum(length for length, _ in prompts) // chunk_tokens)


def test_short_and_long_prompts_progress_together() -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK)
    long = steps.add(100 * CHUNK)
    alone = steps.run_step()
    assert alone is not None
    assert [len(request.token_ids) for request in alone.scheduled] == [CHUNK]
    for _ in range(10):
        shorts = [steps.add(SHARE) for _ in range(3)]
        plan = steps.run_step()
        assert plan is not None
        assert all(steps.ended[short] == steps.num_steps for short in shorts)
        assert {request.room: len(request.token_ids) for request in plan.scheduled}[long] == SHARE


EFFICIENT = 1 / 8
"""Share of a full step from which on a step is efficient."""


def test_short_prompts_do_not_wait_for_each_other() -> None:
    """Short steps cut the mean latency by a third and cost 4 % of throughput."""
    step_s, token_s = 0.05 * EFFICIENT * CHUNK, 1.0

    def times_s(efficient_share: float) -> list[float]:
        steps, now_s, times_s = PrefillSteps(chunk_tokens=CHUNK, efficient_share=efficient_share), 0.0, []
        for _ in range(16):
            steps.add(CHUNK // 16)
        while (plan := steps.run_step()) is not None:
            now_s += step_s + token_s * sum(len(request.token_ids) for request in plan.scheduled)
            times_s += [now_s for end in steps.ended.values() if end == steps.num_steps]
        return times_s

    early, late = times_s(EFFICIENT), times_s(1.0)
    assert fmean(early) < 2 / 3 * fmean(late)
    assert early[-1] < 1.04 * late[-1]


@given(prompts=st.lists(st.integers(1, 4096), min_size=1, max_size=12), share=st.floats(0.05, 1.0))
def test_a_step_is_efficient_and_full_unless_it_completes_a_prompt(prompts: list[int], share: float) -> None:
    steps = PrefillSteps(num_pages=20_000, chunk_tokens=1024, efficient_share=share)
    for length in prompts:
        steps.add(length)
    num_left = sum(prompts)
    while (plan := steps.run_step()) is not None:
        num_tokens = sum(len(request.token_ids) for request in plan.scheduled)
        num_left -= num_tokens
        assert num_tokens >= int(share * 1024) or not num_left
        assert num_tokens == 1024 or any(request.samples for request in plan.scheduled)
    assert not num_left


def test_the_oldest_have_their_share_of_short_steps() -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK, efficient_share=EFFICIENT)
    oldest = steps.add(20 * CHUNK)
    for _ in range(50):
        steps.add(CHUNK // 16)
        steps.add(CHUNK // 16)
        plan = steps.run_step()
        assert plan is not None
        counts = {request.room: len(request.token_ids) for request in plan.scheduled}
        num_tokens = sum(counts.values())
        assert num_tokens <= 2 * EFFICIENT * CHUNK
        assert counts[oldest] >= num_tokens // 4 // 2, "two length classes have oldest sequences"


def test_a_prompt_of_a_few_steps_is_not_starved_by_shorter_ones_while_another_is_the_oldest() -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK)
    oldest = steps.add(200 * CHUNK)
    medium = steps.add(4 * CHUNK)
    while medium not in steps.ended:
        for _ in range(6):
            steps.add(SHARE)
        steps.run_step()
        assert steps.num_steps <= 4 * CHUNK // (SHARE // LENGTHS)
    assert oldest not in steps.ended


def test_a_wait_for_a_page_passes_priority_to_its_computing_request() -> None:
    prompt = list(range(1000, 1000 + 40 * CHUNK))
    steps = PrefillSteps(chunk_tokens=CHUNK, prefix_cache=True)
    steps.add(prompt, priority=9)
    urgent = steps.add([*prompt[: 4 * CHUNK], *range(SHARE)], priority=-1)
    while urgent not in steps.ended:
        for _ in range(6):
            steps.add(CHUNK)
        steps.run_step()
    assert steps.num_steps <= 6


def test_the_oldest_gets_what_the_others_leave_even_when_all_requests_are_taken() -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK, max_requests=2)
    steps.add(10 * CHUNK)
    steps.add(8)
    steps.add(8)
    plan = steps.run_step()
    assert plan is not None
    assert [len(request.token_ids) for request in plan.scheduled] == [CHUNK - 8, 8]


def test_priorities_order_waiting_requests_and_the_oldest_keeps_its_share() -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK)
    oldest = steps.add(10 * CHUNK, priority=9)
    usual = steps.add(2 * CHUNK)
    urgent = steps.add(2 * CHUNK, priority=-1)
    while urgent not in steps.ended:
        plan = steps.run_step()
        assert plan is not None
        assert {request.room: len(request.token_ids) for request in plan.scheduled}[oldest] >= SHARE // LENGTHS
    steps.run()
    assert steps.ended[urgent] < steps.ended[usual] < steps.ended[oldest]


def test_an_urgent_sequence_is_found_in_any_queue() -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK, max_requests=2)
    for _ in range(2 * LOOKAHEAD):
        steps.add(CHUNK)
    urgent = steps.add(8, priority=-1)
    steps.run_step()
    assert urgent in steps.ended


@given(
    wanted=st.integers(1, 40),
    running=st.lists(st.integers(1, 20), max_size=6),
    rivals=st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 1)), min_size=1, max_size=4),
)
def test_a_waiting_request_gets_pages_despite_smaller_rivals(
    wanted: int, running: list[int], rivals: list[tuple[int, int]]
) -> None:
    """The pool has 40 pages, and rivals never stop arriving."""
    num_pages = 40
    steps = PrefillSteps(num_pages=num_pages, chunk_tokens=CHUNK)
    before = [steps.add(pages * PAGE_SIZE) for pages in running]
    steps.run_step()
    waiting = steps.add(wanted * PAGE_SIZE, priority=1)
    # Earlier sequences, running and passing ones (at most two pools), and the sequence itself.
    work = sum(running) + 2 * num_pages + wanted
    most_ends = len(before) + 2 * num_pages + 1
    bound = steps.num_steps + -(-work * PAGE_SIZE // SHARE) + most_ends
    while waiting not in steps.ended:
        for pages, priority in rivals:
            steps.add(pages * PAGE_SIZE, priority)
        steps.run_step()
        assert steps.num_steps <= bound


def test_short_prompts_pass_a_long_one_that_waits_for_another_long_one() -> None:
    steps = PrefillSteps(num_pages=100, chunk_tokens=CHUNK)
    first, second = steps.add(70 * PAGE_SIZE), steps.add(80 * PAGE_SIZE)
    while first not in steps.ended:
        short = steps.add(4 * PAGE_SIZE)
        steps.run_step()
        assert short in steps.ended or first in steps.ended
    assert steps.num_steps > 70 * PAGE_SIZE // CHUNK
    steps.run()
    assert second in steps.ended


def test_a_prompt_being_computed_is_awaited_and_found_in_the_cache() -> None:
    prompt = list(range(4 * CHUNK + 2))
    steps = PrefillSteps(chunk_tokens=CHUNK, prefix_cache=True)
    rooms = [steps.add(prompt) for _ in range(3)]
    steps.run()
    # The two waiting requests compute only the tokens after their last full page, in the first one's step.
    assert steps.num_computed == len(prompt) + 2 * 2
    assert {steps.ended[room] for room in rooms} == {5}


def test_no_request_waits_for_a_prompt_without_a_common_full_page_or_cache() -> None:
    page, numbers = list(range(PAGE_SIZE - 1)), count(100)
    steps = PrefillSteps(chunk_tokens=CHUNK, prefix_cache=True)
    rooms = [steps.add([*page, *(next(numbers) for _ in range(5))]) for _ in range(4)]
    steps.run_step()
    assert all(steps.ended[room] == 1 for room in rooms)
    steps = PrefillSteps(chunk_tokens=CHUNK)
    rooms = [steps.add(list(range(16))) for _ in range(4)]
    steps.run_step()
    assert all(steps.ended[room] == 1 for room in rooms)


@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=8))
def test_no_page_is_computed_twice_while_the_cache_lasts(prompts: list[list[int]]) -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK, prefix_cache=True)
    rooms = {steps.add(prompt) for prompt in prompts}
    steps.run()
    assert steps.ended.keys() == rooms
    full = {tuple(prompt[:end]) for prompt in prompts for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE)}
    # Tokens without a cached page: the rest after the last full page, or the last page if nothing follows it.
    rests = sum(len(prompt) % PAGE_SIZE or PAGE_SIZE for prompt in prompts)
    assert steps.num_computed <= len(full) * PAGE_SIZE + rests


def test_of_equally_long_prompts_the_longest_cached_prefix_goes_first() -> None:
    document = list(range(1000, 1000 + 5 * PAGE_SIZE))
    steps = PrefillSteps(chunk_tokens=6 * PAGE_SIZE, prefix_cache=True)
    steps.add(document)
    steps.run()
    steps.add(100 * PAGE_SIZE)
    fresh = steps.add(6 * PAGE_SIZE)
    known = steps.add([*document, *range(PAGE_SIZE)])
    steps.run()
    assert steps.ended[known] < steps.ended[fresh]


def test_nothing_is_hashed_where_nothing_is_cached() -> None:
    steps = PrefillSteps()
    steps.add(pages_for(100, PAGE_SIZE))
    steps.run_step()
    sequence = steps.add(1000)
    steps.run_step()
    assert sequence not in steps.ended
    assert not any(held.page_keys for held in steps.steps.holders.running.values())
