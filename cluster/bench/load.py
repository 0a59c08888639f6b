"""Load generator of `baton bench serve`, and the latency and throughput that it measures."""

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from cluster.bench.endpoint import FORM_ERRORS, EndpointError, checked, key_headers, parse_line, wrong_event
from cluster.bench.workload import PlannedRequest, Workload

_RUN_SALT = secrets.token_hex(8)
"""Cache salt that prevents cache hits on prompts from earlier runs."""
_TIMEOUT_S = 600.0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Measurements of one request, with times in monotonic seconds."""

    sent_s: float
    ended_s: float = math.inf
    arrivals_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Cached prompt tokens, as reported by the endpoint."""
    trace_path: str | None = None
    """Path of the request's trace at the endpoint."""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first. A response that arrives in one chunk hides it: 0."""
        if not self.arrivals_s or self.num_output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and percentiles of one latency in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Metrics of the requests that succeeded in a run."""

    completed: int
    failed: int
    duration_s: float
    """Time from the first request to the end of the last one."""
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    """Fraction of prompt tokens found in the cache."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens per second."""
    ttft_ms: Quantiles | None
    """Time to first token. Like the other latencies, None if it was measured for no request."""
    tpot_ms: Quantiles | None
    """Time per output token after the first, one value per request."""
    itl_ms: Quantiles | None
    """Inter-token latency, one value per pair of consecutive chunks."""
    e2el_ms: Quantiles | None
    """End-to-end latency."""
    goodput: float | None
    """Requests per second that reached all goals; None if there are no goals."""
    errors: dict[str, int]


class Goals(NamedTuple):
    """Latencies in milliseconds that a request must not exceed. None sets no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def reached(self, record: RequestRecord) -> bool:
        latencies_s = (record.ttft_s, record.tpot_s, record.ended_s - record.sent_s)
        return all(
            goal is None or latency_s is None or 1000 * latency_s <= goal
            for goal, latency_s in zip(self, latencies_s, strict=True)
        )


async def run_load(
    url: str,
    model: str,
    workload: Workload,
    *,
    traced: bool,
    on_progress: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """Send a warm-up request and then the workload. Return one record per request, in order of arrival.

    With ``traced``, the endpoint traces the middle request. ``on_progress`` is called when a request ends.

    Raises:
        EndpointError: the warm-up request failed.
        httpx.HTTPError: the endpoint cannot be reached.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=workload.concurrency)
    timeout = httpx.Timeout(_TIMEOUT_S, connect=10.0)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, headers=key_headers()) as client:
        record = await complete(client, model, workload.warm_up)
        if record.error is not None:
            raise EndpointError(f"the warm-up request failed: {record.error}")
        limit = asyncio.Semaphore(workload.concurrency) if workload.concurrency else contextlib.nullcontext()
        middle = len(workload.requests) // 2 if traced else None
        start_s = time.monotonic()

        async def send(index: int) -> RequestRecord:
            request = workload.requests[index]
            await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.monotonic()))
            async with limit:
                record = await complete(client, model, request, traced=index == middle)
            on_progress(record)
            return record

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(index)) for index in range(len(workload.requests))]
        return [task.result() for task in tasks]


async def complete(
    client: httpx.AsyncClient, model: str, request: PlannedRequest, *, traced: bool = False, is_greedy: bool = True
) -> RequestRecord:
    """Send one request and read its stream. An error is recorded, not raised.

    If the request is not greedy, the endpoint samples as it does by default.
    """
    body = {
        "model": model,
        "prompt": request.make_prompt(),
        "max_tokens": request.output_len,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": _RUN_SALT,
        "stream_options": {"include_usage": True},
    }
    body |= {"temperature": 0} if is_greedy else {}
    body |= {"trace": True} if traced else {}
    record = RequestRecord(sent_s=time.monotonic())
    try:
        finished = await _read_stream(client, body, record)
        if not finished:
            raise EndpointError("the stream ended before its finish_reason")
        if record.num_output_tokens != request.output_len:
            raise EndpointError(f"got {record.num_output_tokens} output tokens, requested {request.output_len}")
    except (httpx.HTTPError, EndpointError, ValueError) as failure:
        record.error = str(failure) or type(failure).__name__
    record.ended_s = time.monotonic()
    return record


async def _read_stream(client: httpx.AsyncClient, body: Mapping[str, Any], record: RequestRecord) -> bool:
    """Record the events of a stream. Return whether one of them has a finish reason."""
    finished = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
        checked(response)
        record.trace_path = response.headers.get("x-baton-trace")
        async for line in response.aiter_lines():
            event = parse_line(line)
            try:
                finished |= event is not None and _note(event, record)
            except FORM_ERRORS as error:
                raise wrong_event(line, "a completion") from error
    return finished


def _note(event: Mapping[str, Any], record: RequestRecord) -> bool:
    """Record one event. Return whether it has a finish reason."""
    ended = False
    for choice in event.get("choices", ()):
        ended |= (is_last := choice.get("finish_reason") is not None)
        # Without token ids, each chunk counts as one token, except a final chunk without text.
        if choice["token_ids"] if "token_ids" in choice else (choice.get("text") or not is_last):
            record.arrivals_s.append(time.monotonic())
    if usage := event.get("usage"):
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]
        record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ended


def fetch_trace(url: str, record: RequestRecord) -> bytes:
    """Return the request's trace as Trace Event JSON.

    Raises:
        EndpointError: the endpoint has no such trace.
        httpx.HTTPError: the endpoint cannot be reached.
    """
    if record.trace_path is None:
        raise EndpointError(f"no trace: {record.error or 'this endpoint does not trace requests'}")
    response = httpx.get(f"{url.rstrip('/')}{record.trace_path}", timeout=60.0, headers=key_headers())
    return checked(response, "no trace: ").content


def summarize(records: Sequence[RequestRecord], goals: Goals | None = None) -> Report:
    """Compute the metrics from at least one record."""
    good = [record for record in records if record.error is None]
    duration_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    prompt_tokens = sum(record.num_prompt_tokens for record in good)
    output_tokens = sum(record.num_output_tokens for record in good)
    return Report(
        completed=len(good),
        failed=len(records) - len(good),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_rate=sum(record.num_cached_tokens for record in good) / max(1, prompt_tokens),
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration_s,
        ttft_ms=_quantiles_ms([record.ttft_s for record in good if record.ttft_s is not None]),
        tpot_ms=_quantiles_ms([record.tpot_s for record in good if record.tpot_s is not None]),
        itl_ms=_quantiles_ms(
            [later - earlier for record in good for earlier, later in itertools.pairwise(record.arrivals_s)]
        ),
        e2el_ms=_quantiles_ms([record.ended_s - record.sent_s for record in good]),
        goodput=None if goals is None else sum(map(goals.reached, good)) / duration_s,
        errors=dict(Counter(record.error for record in records if record.error is not None)),
    )


def _quantiles_ms(values_s: Sequence[float]) -> Quantiles | None:
    import numpy as np  # slow to import, and every command imports this module

    if not values_s:
        return None
    values_ms = np.array(values_s) * 1000
    return Quantiles(float(values_ms.mean()), *map(float, np.percentile(values_ms, (50, 90, 99))))
