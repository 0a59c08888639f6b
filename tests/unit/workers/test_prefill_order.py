"""Bounds on waiting times of prompts, in steps of the whole prefill scheduler."""

from collections.abc import Sequence
from itertools import accumulate, count
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planner.projections import GPU_RATES
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.strategy import CpMode, PassingSetting, StrategySetting
from tests.fakes.prefill_steps import PAGE_SIZE, PrefillSteps
from workers.context_parallel.chunk_sizes import efficient_share
from workers.context_parallel.cost_model import ModelShape
from workers.context_parallel.strategy_chooser import StrategyChooser
from workers.scheduler.waiting import LOOKAHEAD

CHUNK = 64
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
LLAMA_8B = ModelShape(
    num_layers=32,
    linear_flops=2 * 218_103_808,
    kv_flops=2 * 8_388_608,
    attention_flops=4 * 4096,
    kv_row_bytes=4096,
    q_row_bytes=8192,
    partial_row_bytes=16_384,
)


CP, FULL = 2, 16_384
"""Two GPUs, and the number of tokens of a full step."""
SHARE_ON_GPUS = efficient_share(LLAMA_8B, GPU_RATES, CP, FULL)


def times_to_the_end_s(share: float, arrivals_s: Sequence[float]) -> list[float]:
    """Return how long prompts of 512 tokens take from arrival to end, by the cost model, in the order of the ends."""
    setting, passing = StrategySetting.AUTO, PassingSetting.AUTO
    choose = StrategyChooser(
        setting=setting, cp=CP, shape=LLAMA_8B, rates=GPU_RATES, mode=CpMode.GATHER, passing=passing
    )
    steps = PrefillSteps(num_pages=5000, chunk_tokens=FULL, efficient_share=share)
    now_s, num_added, times_s = 0.0, 0, list[float]()
    while len(times_s) < len(arrivals_s):
        while num_added < len(arrivals_s) and arrivals_s[num_added] <= now_s:
            assert steps.add(512) == num_added
            num_added += 1
        plan = steps.run_step()
        if plan is None:
            now_s = arrivals_s[num_added]
            continue
        estimate_s = choose(plan.scheduled).estimate_s
        assert estimate_s is not None
        now_s += estimate_s
        times_s += [now_s - arrivals_s[room] for room, end in steps.ended.items() if end == steps.num_steps]
    return times_s


def test_short_prompts_do_not_wait_for_each_other() -> None:
    """Efficient steps cut the mean latency by a third and cost 7 % of throughput."""
    early, late = times_to_the_end_s(SHARE_ON_GPUS, [0.0] * 32), times_to_the_end_s(1.0, [0.0] * 32)
    assert fmean(early) < 2 / 3 * fmean(late)
    assert early[-1] < 1.08 * late[-1]


@pytest.mark.parametrize(("per_s", "shorter"), [(70, 1.05), (90, 1.2), (105, 1.5)])
def test_shorter_steps_than_efficient_ones_are_slower_under_load(per_s: int, shorter: float) -> None:
    """Two GPUs compute about 110 prompts per second."""
    draw = Random(1)
    arrivals_s = list(accumulate(draw.expovariate(per_s) for _ in range(300)))
    mean_s = {scale: fmean(times_to_the_end_s(SHARE_ON_GPUS * scale, arrivals_s)) for scale in (0.2, 1.0)}
    assert mean_s[0.2] > shorter * mean_s[1.0]


@given(prompts=st.lists(st.integers(1, 4096), min_size=1, max_size=12), share=st.floats(0.05, 1.0))
def test_a_step_is_efficient_and_longer_only_to_complete_a_prompt(prompts: list[int], share: float) -> None:
    steps = PrefillSteps(num_pages=20_000, chunk_tokens=1024, efficient_share=share)
    for length in prompts:
        steps.add(length)
    num_left = sum(prompts)
    while (plan := steps.run_step()) is not None:
        num_tokens = sum(len(request.token_ids) for request in plan.scheduled)
        # A prompt that is not complete after five efficient steps is divided evenly.
        least = min(1024, int(5 / 2 * share * 1024))
        assert num_tokens >= int(share * 1024) or num_tokens == num_left
        assert num_tokens >= least or any(request.samples for request in plan.scheduled)
        num_left -= num_tokens
    assert not num_left


def test_an_efficient_step_ends_where_a_prompt_is_complete() -> None:
    steps = PrefillSteps(chunk_tokens=CHUNK, efficient_share=EFFICIENT)
    for length in (6, 6, 6, 20, 6):
        steps.add(length)
    steps.run()
    # An efficient step has 8 tokens.
    assert steps.ended == {0: 1, 1: 1, 2: 2, 4: 2, 3: 3}


def test_the_steps_of_a_long_prompt_are_short_soon_after_an_arrival() -> None:
    """Another arrival waits for the step under way."""
    steps = PrefillSteps(chunk_tokens=CHUNK, efficient_share=1 / 64)
    long = steps.add(100 * CHUNK)

    def step() -> dict[Room, int]:
        plan = steps.run_step()
        assert plan is not None
        return {request.room: len(request.token_ids) for request in plan.scheduled}

    assert [step()[long] for _ in range(7)] == [5, 5, 10, 20, 40, CHUNK, CHUNK]
    short = steps.add(1)
    assert step() == {long: 1, short: 1}
    assert [step()[long] for _ in range(6)] == [4, 5, 11, 23, 47, CHUNK]


@given(length=st.integers(1, 1024), share=st.floats(0.01, 0.2))
def test_the_last_step_of_a_lone_prompt_is_not_a_short_rest(length: int, share: float) -> None:
    """A rank sends the KV of earlier steps while the last step computes."""
    steps = PrefillSteps(num_pages=20_000, chunk_tokens=1024, efficient_share=share)
    room = steps.add(length)
    counts = []
    while (plan := steps.run_step()) is not None:
        counts += [len(request.token_ids) for request in plan.scheduled]
    assert room in steps.ended
    assert sum(counts) == length
    assert counts[-1] >= counts[0] - len(counts)


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
