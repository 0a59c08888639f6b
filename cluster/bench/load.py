"""Runs a workload against an endpoint: who sends next, and when. Figures are made in statistics.py."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from cluster.bench.api_key import key_headers
from cluster.bench.client import StreamError, complete
from cluster.bench.sse import error_message
from cluster.bench.statistics import RequestRecord
from cluster.bench.workload import PlannedRequest, Workload

_TIMELINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What came of one run."""

    model: str
    """The name that was asked for."""
    records: list[RequestRecord]
    """One a request, in order of arrival."""

    @property
    def timed(self) -> RequestRecord:
        """Of the request in the middle, which is the one that is timed if one is."""
        return self.records[len(self.records) // 2]


async def run_load(
    url: str,
    model: str | None,
    workload: Workload,
    *,
    num_warmup: int,
    timeout_s: float,
    timed: bool,
    on_progress: Callable[[RequestRecord], None],
) -> LoadResult:
    """Warm up and send the workload; with ``timed``, the request in the middle asks for a timeline.

    Raises:
        StreamError: the endpoint serves no model, or a warm-up request failed.
        httpx.HTTPError: nothing answers at the URL.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=workload.concurrency)
    timeout = httpx.Timeout(timeout_s, connect=10.0)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, headers=key_headers()) as client:
        served = model or await first_model(client)
        await _warm_up(client, served, workload, num_warmup)
        requests = workload.requests()
        middle = len(requests) // 2 if timed else None
        records = await _send_all(client, served, requests, middle, workload.concurrency, on_progress)
        return LoadResult(model=served, records=records)


def fetch_timeline(url: str, record: RequestRecord) -> bytes:
    """The timeline of a request that asked for one, as Trace Event JSON.

    Raises:
        StreamError: there is none.
        httpx.HTTPError: the endpoint does not answer.
    """
    if record.timeline_path is None:
        raise StreamError(f"no timeline: {record.error or 'this endpoint makes none'}")
    response = httpx.get(f"{url.rstrip('/')}{record.timeline_path}", timeout=_TIMELINE_S, headers=key_headers())
    if response.status_code != 200:
        raise StreamError(f"no timeline: HTTP {response.status_code}: {error_message(response.text)}")
    return response.content


async def first_model(client: httpx.AsyncClient) -> str:
    """The name of the first model that ``/v1/models`` lists.

    Raises:
        StreamError: it lists none, or answers with an error.
    """
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise StreamError(f"/v1/models: HTTP {response.status_code}: {error_message(response.text)}")
    models = response.json()["data"]
    if not models:
        raise StreamError("/v1/models lists no model")
    return str(models[0]["id"])


async def _warm_up(client: httpx.AsyncClient, model: str, workload: Workload, num_warmup: int) -> None:
    for request in workload.warmup(num_warmup):
        record = await complete(client, model, request.make_prompt(), request.output_len)
        if record.error is not None:
            raise StreamError(f"a warm-up request failed: {record.error}")


async def _send_all(
    client: httpx.AsyncClient,
    model: str,
    requests: Sequence[PlannedRequest],
    timed: int | None,
    concurrency: int | None,
    on_progress: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    limit = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    start_s = time.monotonic()

    async def send(index: int, request: PlannedRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.monotonic()))
        async with limit:
            record = await complete(client, model, request.make_prompt(), request.output_len, timed=index == timed)
        on_progress(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(index, request)) for index, request in enumerate(requests)]
    return [task.result() for task in tasks]
