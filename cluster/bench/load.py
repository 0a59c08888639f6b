"""Load generator of `baton bench serve`: sends requests to /v1/completions and records when tokens arrive."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from cluster.bench.endpoint import EndpointError, error_message, key_headers, parse_line
from cluster.bench.report import RequestRecord
from cluster.bench.workload import PlannedRequest, Workload

_RUN_SALT = secrets.token_hex(8)
"""Cache salt that keeps a run from hitting prefix-cache entries of an earlier run."""
_TIMEOUT_S = 600.0
"""Maximum time without data from the endpoint."""


async def run_load(
    url: str, model: str, workload: Workload, *, traced: bool = False, on_progress: Callable[[], None] = lambda: None
) -> list[RequestRecord]:
    """Send a warm-up request and then the workload; return one record per request, in order of arrival.

    With ``traced``, the endpoint traces the middle request.

    Raises:
        EndpointError: the warm-up request failed.
        httpx.HTTPError: nothing answers at the URL.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=workload.concurrency)
    timeout = httpx.Timeout(_TIMEOUT_S, connect=10.0)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, headers=key_headers()) as client:
        record = await _complete(client, model, workload.warm_up)
        if record.error is not None:
            raise EndpointError(f"the warm-up request failed: {record.error}")
        limit = asyncio.Semaphore(workload.concurrency) if workload.concurrency else contextlib.nullcontext()
        middle = len(workload.requests) // 2 if traced else None
        start_s = time.monotonic()

        async def send(index: int) -> RequestRecord:
            request = workload.requests[index]
            await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.monotonic()))
            async with limit:
                record = await _complete(client, model, request, traced=index == middle)
            on_progress()
            return record

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(index)) for index in range(len(workload.requests))]
        return [task.result() for task in tasks]


async def _complete(
    client: httpx.AsyncClient, model: str, request: PlannedRequest, *, traced: bool = False
) -> RequestRecord:
    body = {
        "model": model,
        "prompt": request.make_prompt(),
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": _RUN_SALT,
        "stream_options": {"include_usage": True},
    } | ({"trace": True} if traced else {})
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
    """Fill in the record; return whether the stream has a finish reason."""
    finished = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise EndpointError(f"HTTP {response.status_code}: {error_message(response.text)}")
        record.trace_path = response.headers.get("x-baton-trace")
        async for line in response.aiter_lines():
            event = parse_line(line)
            if event is not None:
                finished |= _note(event, record)
    return finished


def _note(event: Mapping[str, Any], record: RequestRecord) -> bool:
    """Record one event; return whether it has a finish reason."""
    ended = False
    for choice in event.get("choices", ()):
        ended |= (is_last := choice.get("finish_reason") is not None)
        # Without token ids only the text shows a token, and may be empty except in the last chunk.
        if choice["token_ids"] if "token_ids" in choice else (choice.get("text") or not is_last):
            record.arrivals_s.append(time.monotonic())
    if usage := event.get("usage"):
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]
        record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ended


def fetch_trace(url: str, record: RequestRecord) -> bytes:
    """Return the trace of a request, as Trace Event JSON.

    Raises:
        EndpointError: the endpoint has no trace of it.
        httpx.HTTPError: the endpoint does not respond.
    """
    if record.trace_path is None:
        raise EndpointError(f"no trace: {record.error or 'this endpoint does not trace requests'}")
    response = httpx.get(f"{url.rstrip('/')}{record.trace_path}", timeout=60.0, headers=key_headers())
    if response.status_code != 200:
        raise EndpointError(f"no trace: HTTP {response.status_code}: {error_message(response.text)}")
    return response.content
