"""Replayed traces: equal ids are equal tokens, lengths and arrivals are kept, hits are those of an endless cache."""

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.trace import (
    BLOCK_LEN,
    TraceEntry,
    infinite_cache_hits,
    read_trace,
    scaled_block_len,
    trace_workload,
)
from cluster.spec.errors import UserError
from tests.fakes.traces import make_entries, write_trace

SCALES = st.floats(0.001, 2)


@given(SCALES, st.integers(0, 1000))
def test_prompts_have_scaled_lengths_and_begin_alike_exactly_as_far_as_their_ids(scale: float, seed: int) -> None:
    entries = [TraceEntry(**entry) for entry in make_entries(8, seed)]
    workload, block_len = trace_workload(entries, scale=scale), scaled_block_len(scale)
    prompts = [request.make_prompt() for request in workload.requests]
    assert prompts == [request.make_prompt() for request in workload.requests]
    for entry, prompt in zip(entries, prompts, strict=True):
        assert len(prompt) == max(1, entry.input_length * block_len // BLOCK_LEN)
    for entry, prompt in zip(entries, prompts, strict=True):
        for other_entry, other in zip(entries, prompts, strict=True):
            shared = min(len(prompt), len(other), _common(entry.hash_ids, other_entry.hash_ids) * block_len)
            assert prompt[:shared] == other[:shared]
            # A few tokens after it may be equal by chance, a whole block of them may not.
            assert _common(prompt, other) < shared + max(block_len, 8)


def test_arrivals_are_kept_and_can_be_hurried() -> None:
    entries = [TraceEntry(time_ms, 1, 3, [1]) for time_ms in (500, 1500, 4500)]
    assert [request.arrival_s for request in trace_workload(entries).requests] == [0.0, 1.0, 4.0]
    assert [request.arrival_s for request in trace_workload(entries, speed=4).requests] == [0.0, 0.25, 1.0]


def test_answers_are_scaled_too_and_never_empty() -> None:
    entries = [TraceEntry(0, 1, output_len, [1]) for output_len in (0, 3, 512)]
    assert [request.output_len for request in trace_workload(entries, scale=0.25).requests] == [1, 1, 128]


def test_warm_up_has_nothing_in_common_with_the_trace() -> None:
    workload = trace_workload([TraceEntry(**entry) for entry in make_entries(20)], scale=0.1)
    warmed = workload.warm_up.make_prompt()
    assert all(_common(warmed, request.make_prompt()) < 8 for request in workload.requests)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=12), st.integers(1, 4))
def test_hits_of_an_endless_cache_are_the_longest_common_beginnings(prompts: list[list[int]], page_size: int) -> None:
    for index, hits in enumerate(infinite_cache_hits(prompts, page_size)):
        prompt, earlier = prompts[index], prompts[:index]
        longest = max((_common(prompt, other) for other in earlier), default=0)
        assert hits == max(0, min(longest, len(prompt) - 1)) // page_size * page_size


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    lines = [json.dumps(entry) for entry in make_entries(5)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*reversed(lines), ""]))
    assert [entry.timestamp for entry in read_trace(path)] == [0, 250, 500, 750, 1000]
    assert [entry.timestamp for entry in read_trace(path, 2)] == [0, 250]
    assert read_trace(write_trace(path, 5)) == read_trace(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: Input data was truncated"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}', "line 1: .*hash_ids"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "got 513 tokens and 1 hash_ids"),
        (
            '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
            "got input_length 0 and output_length 1; allowed",
        ),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=message):
        read_trace(path)


def test_a_missing_file_and_senseless_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trace\.jsonl: No such file"):
        read_trace(tmp_path / "trace.jsonl")
    entries = [TraceEntry(0, 1, 1, [1])]
    for make, message in [
        (partial(trace_workload, entries, scale=0.0), "--trace-scale: got 0.0"),
        (partial(trace_workload, entries, speed=-1.0), "--trace-speed: got -1"),
        (partial(trace_workload, []), "--trace: got no requests"),
    ]:
        with pytest.raises(UserError, match=message):
            make()


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
