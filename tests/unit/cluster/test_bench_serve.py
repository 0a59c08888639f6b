"""`baton bench serve`: its metrics, workloads and traces."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.dataset import PromptEntry, read_dataset, read_trace
from cluster.bench.endpoint import EndpointError, error_message, first_model, parse_line
from cluster.bench.load import Goals, Quantiles, RequestRecord, complete, summarize
from cluster.bench.workload import (
    BLOCK_LEN,
    FIRST_TOKEN_ID,
    VOCAB_SIZE,
    PlannedRequest,
    TraceEntry,
    random_workload,
    trace_workload,
)
from cluster.spec.errors import UserError
from tests.fakes.traces import make_entries, prompt_ids, write_trace

_workload = partial(random_workload, num_requests=2, input_len=4, output_len=2, concurrency=1)

TWO_ANSWERS_AND_A_FAILURE = [
    RequestRecord(sent_s=10.0, ended_s=12.0, arrivals_s=[10.5, 11.0, 12.0], num_prompt_tokens=8, num_output_tokens=4),
    RequestRecord(sent_s=11.0, ended_s=14.0, arrivals_s=[11.1], num_prompt_tokens=8, num_output_tokens=1),
    RequestRecord(sent_s=12.0, ended_s=15.0, arrivals_s=[12.5, 13.0], error="HTTP 503: nothing is ready"),
]


def test_throughput_counts_only_what_succeeded_over_the_whole_run() -> None:
    report = summarize(TWO_ANSWERS_AND_A_FAILURE)
    assert (report.completed, report.failed) == (2, 1)
    assert report.duration_s == 5.0
    assert (report.prompt_tokens, report.output_tokens) == (16, 5)
    assert report.requests_per_s == pytest.approx(0.4)
    assert report.output_tokens_per_s == pytest.approx(1.0)
    assert report.total_tokens_per_s == pytest.approx(21 / 5)
    assert report.errors == {"HTTP 503: nothing is ready": 1}


def test_latencies_in_milliseconds() -> None:
    report = summarize(TWO_ANSWERS_AND_A_FAILURE)
    # 500 ms and 100 ms; (12.0 - 10.5) / 3; 500 and 1000; 2000 and 3000.
    assert _values(report.ttft_ms) == pytest.approx((300, 300, 460, 496))
    assert _values(report.tpot_ms) == pytest.approx((500, 500, 500, 500))
    assert _values(report.itl_ms) == pytest.approx((750, 750, 950, 995))
    assert _values(report.e2el_ms) == pytest.approx((2500, 2500, 2900, 2990))


@pytest.mark.parametrize(
    ("goals", "reached"),
    [
        (Goals(ttft=500), 2),
        (Goals(ttft=499), 1),
        (Goals(ttft=499, tpot=1), 1),
        (Goals(tpot=499), 1),
        (Goals(e2el=1999), 0),
        (Goals(ttft=500, tpot=500, e2el=3000), 2),
    ],
)
def test_goodput_counts_what_reaches_all_goals(goals: Goals, reached: int) -> None:
    assert summarize(TWO_ANSWERS_AND_A_FAILURE).goodput is None
    assert summarize(TWO_ANSWERS_AND_A_FAILURE, goals).goodput == pytest.approx(reached / 5)


@given(st.integers(1, 20), st.integers(1, 40))
def test_prompts_have_the_requested_length_and_range(count: int, length: int) -> None:
    workload = _workload(num_requests=count, input_len=length)
    prompts = [prompt_ids(request) for request in workload.requests]
    assert [len(prompt) for prompt in prompts] == [length] * count
    assert all(FIRST_TOKEN_ID <= token < VOCAB_SIZE for prompt in prompts for token in prompt)
    assert prompts == [prompt_ids(request) for request in workload.requests]


def test_open_loop_arrivals_have_the_mean_rate() -> None:
    workload = _workload(num_requests=4001, request_rate=20.0, concurrency=None)
    arrivals_s = [request.arrival_s for request in workload.requests]
    assert arrivals_s[0] == 0.0
    assert arrivals_s == sorted(arrivals_s)
    gaps_s = np.diff(arrivals_s)
    # Exponential gaps: mean and standard deviation are both 1/rate.
    assert float(np.mean(gaps_s)) == pytest.approx(0.05, rel=0.06)
    assert float(np.std(gaps_s)) == pytest.approx(0.05, rel=0.1)


def test_stream_lines() -> None:
    assert parse_line('data: {"choices": []}') == {"choices": []}
    assert parse_line("data: [DONE]") is None
    assert parse_line(": still waiting") is None
    assert parse_line("") is None
    with pytest.raises(ValueError, match="not a JSON object"):
        parse_line("data: 7")
    with pytest.raises(EndpointError, match="the replica is gone"):
        parse_line('data: {"error": {"message": "the replica is gone"}}')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "no such model", "code": 404}}', "no such model"),
        ('{"error": "short"}', "short"),
        ("<html>bad gateway</html>", "<html>bad gateway</html>"),
        ("", "empty response"),
    ],
)
def test_error_messages(body: str, message: str) -> None:
    assert error_message(body) == message


@pytest.mark.parametrize("body", ["<html>Welcome</html>", "[]", '{"models": []}', '{"data": []}', '{"data": [{}]}'])
def test_an_endpoint_without_models_is_an_error(body: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    with (
        httpx.Client(base_url="http://endpoint", transport=transport) as client,
        pytest.raises(EndpointError, match=r"/v1/models: got .* expected a list of models"),
    ):
        first_model(client)


@pytest.mark.parametrize("event", ['{"choices": null}', '{"choices": [3]}', '{"usage": {"prompt_tokens": 1}}'])
async def test_an_event_that_is_not_a_completion_fails_its_request_only(event: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=f"data: {event}\n\n"))
    request = PlannedRequest(arrival_s=0.0, output_len=1, prompt="a")
    async with httpx.AsyncClient(base_url="http://endpoint", transport=transport) as client:
        record = await complete(client, "model", request)
    assert record.error is not None
    assert "which is not a completion" in record.error


def _values(quantiles: Quantiles | None) -> tuple[float, ...]:
    assert quantiles is not None
    return dataclasses.astuple(quantiles)


SCALES = st.floats(0.001, 2)


@given(SCALES, st.integers(0, 1000))
def test_prompts_have_scaled_lengths_and_begin_alike_exactly_as_far_as_their_ids(scale: float, seed: int) -> None:
    entries = [TraceEntry(**entry) for entry in make_entries(8, seed)]
    workload, block_len = trace_workload(entries, scale=scale), max(1, round(BLOCK_LEN * scale))
    prompts = [prompt_ids(request) for request in workload.requests]
    assert prompts == [prompt_ids(request) for request in workload.requests]
    for entry, prompt in zip(entries, prompts, strict=True):
        assert len(prompt) == max(1, entry.input_length * block_len // BLOCK_LEN)
    for entry, prompt in zip(entries, prompts, strict=True):
        for other_entry, other in zip(entries, prompts, strict=True):
            shared = min(len(prompt), len(other), _common(entry.hash_ids, other_entry.hash_ids) * block_len)
            assert prompt[:shared] == other[:shared]
            # A few more tokens can be equal by chance, but not a whole block.
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
    warmed = prompt_ids(workload.warm_up)
    assert all(_common(warmed, prompt_ids(request)) < 8 for request in workload.requests)


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
def test_an_invalid_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=message):
        read_trace(path)


def test_missing_and_empty_files_and_senseless_values_are_refused(tmp_path: Path) -> None:
    path, entries = tmp_path / "trace.jsonl", [TraceEntry(0, 1, 1, [1])]
    with pytest.raises(UserError, match=r"trace\.jsonl: No such file"):
        read_trace(path)
    path.touch()
    with pytest.raises(UserError, match=r"trace\.jsonl: got no requests"):
        read_trace(path)
    for rate in (0.0, math.nan):
        with pytest.raises(UserError, match=f"--request-rate: got {rate}; allowed: a finite number"):
            _workload(request_rate=rate)
    with pytest.raises(UserError, match=r"--trace-scale: got 0.0"):
        trace_workload(entries, scale=0.0)
    with pytest.raises(UserError, match=r"--trace-speed: got -1"):
        trace_workload(entries, speed=-1.0)


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_datasets_are_recognized_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text('{"prompt": "one", "output_len": 3}\n\n{"prompt": "two"}\n')
    assert read_dataset(path) == [PromptEntry("one", 3), PromptEntry("two")]
    assert read_dataset(path, 1) == [PromptEntry("one", 3)]
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}, {"from": "human", "value": "Bye"}]
    path.write_text(json.dumps([{"id": "a", "conversations": turns}, {"conversations": turns[:1]}, {"id": "c"}]))
    assert read_dataset(path) == [PromptEntry("Hi", answer="Hello.")]
    assert read_dataset(write_trace(path, 5)) == read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"conversations": 3}]', "Expected `array`.*allowed: ShareGPT conversations, or JSON lines"),
        ("[]", "got no requests"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2: Expected `str` of length >= 1"),
        ('{"prompt": "a", "output_len": 0}', "line 1: Expected `int` >= 1"),
        ("\xff", "line 1: "),
    ],
)
def test_an_invalid_dataset_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_dataset(path)
