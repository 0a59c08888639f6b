"""The figures of `baton bench` against hand-made records and an independent quantile."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.endpoint import EndpointError, error_message, parse_line
from cluster.bench.statistics import Quantiles, RequestRecord, parse_goodput, summarize
from cluster.bench.workload import FIRST_TOKEN_ID, VOCAB_SIZE, Workload, random_workload
from cluster.spec.errors import UserError

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
    # Of 500 and 100; (12.0 - 10.5) / 3; of 500 and 1000; of 2000 and 3000.
    assert _values(report.ttft_ms) == pytest.approx((300, 300, 460, 496))
    assert _values(report.tpot_ms) == pytest.approx((500, 500, 500, 500))
    assert _values(report.itl_ms) == pytest.approx((750, 750, 950, 995))
    assert _values(report.e2el_ms) == pytest.approx((2500, 2500, 2900, 2990))


def test_goodput_counts_requests_within_all_limits() -> None:
    for text, goodput in [("ttft:500", 2), ("ttft:499", 1), ("ttft:500, tpot:499", 1), ("e2el:1999", 0)]:
        assert summarize(TWO_ANSWERS_AND_A_FAILURE, parse_goodput(text)).goodput_per_s == pytest.approx(goodput / 5)
    assert summarize(TWO_ANSWERS_AND_A_FAILURE).goodput_per_s is None


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:0", "itl:5", "ttft:5,"])
def test_wrong_goodput_limits_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="allowed: METRIC:MILLISECONDS with a metric of ttft, tpot, e2el"):
        parse_goodput(text)


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 3))
def test_prompts_have_the_length_and_range_asked_for(count: int, length: int, seed: int) -> None:
    workload = _workload(num_requests=count, input_len=length, seed=seed)
    prompts = [request.make_prompt() for request in workload.requests]
    assert [len(prompt) for prompt in prompts] == [length] * count
    assert all(FIRST_TOKEN_ID <= token < VOCAB_SIZE for prompt in prompts for token in prompt)
    assert prompts == [request.make_prompt() for request in workload.requests]


def test_open_loop_arrivals_have_the_mean_rate() -> None:
    workload = _workload(num_requests=4001, request_rate=20.0, concurrency=None)
    arrivals_s = [request.arrival_s for request in workload.requests]
    assert arrivals_s[0] == 0.0
    assert arrivals_s == sorted(arrivals_s)
    gaps_s = np.diff(arrivals_s)
    # Exponential gaps: mean and standard deviation are both 1/rate.
    assert float(np.mean(gaps_s)) == pytest.approx(0.05, rel=0.06)
    assert float(np.std(gaps_s)) == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(_workload, concurrency=None), "--concurrency: got none, and no --request-rate"),
        (partial(_workload, request_rate=0.0), "--request-rate: got 0.0; allowed: a finite number"),
        (partial(_workload, request_rate=math.nan), "--request-rate: got nan; allowed: a finite number"),
    ],
)
def test_senseless_workloads_are_refused(make: Callable[[], Workload], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


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


def _values(quantiles: Quantiles | None) -> tuple[float, ...]:
    assert quantiles is not None
    return dataclasses.astuple(quantiles)
