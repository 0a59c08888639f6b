"""`baton bench serve`: options and output; the load generator is in cluster/bench."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.bench.endpoint import EndpointError, first_model, key_headers
from cluster.bench.load import fetch_trace, run_load
from cluster.bench.statistics import GOODPUT_METRICS, Report, RequestRecord, parse_goodput, summarize
from cluster.bench.trace import infinite_cache_hits, read_trace, trace_workload
from cluster.bench.workload import Workload, random_workload
from cluster.cli.bench import Json, fail, print_table

NUM_REQUESTS, CONCURRENCY = 32, 4
PAGE_SIZE = 64
"""Page size of the unbounded cache that a trace is compared with."""


def serve(
    url: Annotated[str, typer.Option(help="Base URL of the endpoint.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; by default the endpoint's first.")] = None,
    num_requests: Annotated[
        int | None, typer.Option(help=f"Number of requests; {NUM_REQUESTS}, or the whole trace, by default.", min=1)
    ] = None,
    input_len: Annotated[int, typer.Option(help="Input tokens per request; a trace has its own.", min=1)] = 512,
    output_len: Annotated[int, typer.Option(help="Output tokens per request; a trace has its own.", min=1)] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(help=f"Maximum requests in flight; {CONCURRENCY} by default, no limit with arrivals.", min=1),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean requests per second, with Poisson arrivals, instead of a closed loop.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay a trace in Mooncake's format: lengths, arrivals, common prefixes.")
    ] = None,
    trace_scale: Annotated[float, typer.Option(help="Multiplier of the trace's lengths.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Speed-up of the trace's arrivals.")] = 1.0,
    goodput: Annotated[
        str | None,
        typer.Option(help=f"Latency objectives in ms, such as ttft:500,tpot:50, of {', '.join(GOODPUT_METRICS)}."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for prompts and arrival times.")] = 0,
    trace_out: Annotated[
        typer.FileBinaryWrite | None,
        typer.Option(
            help="Write a trace of the middle request on all ranks, for Perfetto.", lazy=False, metavar="<path>"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Benchmark a running endpoint: latency, throughput and cache hits."""
    goodput_ms = None if goodput is None else parse_goodput(goodput)
    if trace is not None:
        entries = read_trace(trace, num_requests)
        workload = trace_workload(entries, scale=trace_scale, speed=trace_speed, concurrency=concurrency, seed=seed)
    else:
        workload = random_workload(
            num_requests=num_requests or NUM_REQUESTS,
            input_len=input_len,
            output_len=output_len,
            concurrency=CONCURRENCY if concurrency is None and request_rate is None else concurrency,
            request_rate=request_rate,
            seed=seed,
        )
    served, records = _measure(url, model, workload, traced=trace_out is not None)
    report = summarize(records, goodput_ms)
    ideal = None if trace is None else _ideal_hit_rate(workload, records)
    if as_json:
        settings = {"url": url, "model": served, **workload.settings, "goodput_ms": goodput_ms}
        print(json.dumps(settings | dataclasses.asdict(report) | {"infinite_cache_hit_rate": ideal}))
    else:
        _print_report(f"{served}: {workload.title}", report, ideal)
    if report.completed == 0:
        fail(f"no request succeeded: {', '.join(report.errors)}")
    if trace_out is not None:
        _write_trace(url, records[len(records) // 2], trace_out)


def _measure(url: str, model: str | None, workload: Workload, *, traced: bool) -> tuple[str, list[RequestRecord]]:
    """Return the name of the model and one record per request."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        if model is None:
            with httpx.Client(base_url=url, timeout=60.0, headers=key_headers()) as client:
                model = first_model(client)
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("requests", total=len(workload.requests))
            load = run_load(url, model, workload, traced=traced, on_progress=lambda: progress.advance(task))
            return model, asyncio.run(load)
    except (httpx.HTTPError, httpx.InvalidURL, EndpointError) as error:
        fail(f"{url}: {error}")
    except KeyboardInterrupt:
        fail("interrupted; nothing is reported", 130)


def _write_trace(url: str, record: RequestRecord, file: typer.FileBinaryWrite) -> None:
    try:
        file.write(fetch_trace(url, record))
    except (httpx.HTTPError, EndpointError) as error:
        fail(f"{url}: {error}")
    print(f"trace: {file.name}; open it at https://ui.perfetto.dev", file=sys.stderr)


def _ideal_hit_rate(workload: Workload, records: Sequence[RequestRecord]) -> float:
    """Return the hit rate that an unbounded cache would have had on the prompts of successful requests."""
    requests = zip(workload.requests, records, strict=True)
    prompts = [request.make_prompt() for request, record in requests if record.error is None]
    return sum(infinite_cache_hits(prompts, PAGE_SIZE)) / max(1, sum(map(len, prompts)))


def _print_report(title: str, report: Report, ideal_hit_rate: float | None) -> None:
    latencies = {
        "time to first token (TTFT)": report.ttft_ms,
        "time per output token (TPOT)": report.tpot_ms,
        "inter-token latency (ITL)": report.itl_ms,
        "end-to-end latency (E2EL)": report.e2el_ms,
    }
    rows = [
        [name, *(f"{value:.2f}" for value in dataclasses.astuple(quantiles))]
        for name, quantiles in latencies.items()
        if quantiles is not None
    ]
    print_table(title, ("milliseconds",), ("mean", "p50", "p90", "p99"), rows)
    goodput = "" if report.goodput_per_s is None else f" (goodput {report.goodput_per_s:.2f})"
    print(
        f"{report.completed} completed, {report.failed} failed in {report.duration_s:.2f} s: "
        f"{report.requests_per_s:.2f} requests/s{goodput}, {report.output_tokens_per_s:.1f} output tokens/s, "
        f"{report.total_tokens_per_s:.1f} total tokens/s"
    )
    if ideal_hit_rate is not None:
        print(f"cache hit rate {report.hit_rate:.2%}, compared with {ideal_hit_rate:.2%} of an unbounded cache")
    for error, count in report.errors.items():
        print(f"{count} x {error}")
