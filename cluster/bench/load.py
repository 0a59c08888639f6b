"""Runs a workload against an endpoint: who sends next, and when. Figures are made in statistics.py."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable

import httpx

from cluster.bench.client import StreamError, complete
from cluster.bench.sse import error_message
from cluster.bench.statistics import RequestRecord
from cluster.bench.workload import Workload


async def run_load(
    url: str,
    model: str | None,
    workload: Workload,
    *,
    num_warmup: int,
    timeout_s: float,
    on_progress: Callable[[RequestRecord], None],
) -> tuple[str, list[RequestRecord]]:
    """Warm up, send the workload, and return the model's name and one record a request, in order of ending.

    Raises:
        StreamError: the endpoint serves no model, or a warm-up request failed.
        httpx.HTTPError: nothing answers at the URL.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=workload.concurrency)
    timeout = httpx.Timeout(timeout_s, connect=10.0)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
        served = model or await first_model(client)
        await _warm_up(client, served, workload, num_warmup)
        return served, await _send_all(client, served, workload, on_progress)


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
    if num_warmup == 0:
        return
    # Other prompts than the measured ones, so that no cache is warmed for them.
    for prompt in dataclasses.replace(workload, num_requests=num_warmup, seed=workload.seed + 1).prompts():
        record = await complete(client, model, prompt, workload.output_len)
        if record.error is not None:
            raise StreamError(f"a warm-up request failed: {record.error}")


async def _send_all(
    client: httpx.AsyncClient, model: str, workload: Workload, on_progress: Callable[[RequestRecord], None]
) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    limit = asyncio.Semaphore(workload.concurrency) if workload.concurrency else contextlib.nullcontext()

    async def send(prompt: list[int], arrival_s: float) -> None:
        await asyncio.sleep(max(0.0, start_s + arrival_s - time.monotonic()))
        async with limit:
            record = await complete(client, model, prompt, workload.output_len)
        records.append(record)
        on_progress(record)

    jobs = list(zip(workload.prompts(), workload.arrivals_s(), strict=True))
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for prompt, arrival_s in jobs:
            group.create_task(send(prompt, arrival_s))
    return records
