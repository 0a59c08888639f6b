"""Options and output of `baton bench serve`. The load generator is in cluster/bench."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.bench.endpoint import EndpointError, first_model, key_headers
from cluster.bench.load import Report, RequestRecord, fetch_trace, run_load, summarize
from cluster.bench.workload import Workload, random_workload, read_trace, trace_workload
from cluster.cli.bench import Json, fail, print_table

NUM_REQUESTS, CONCURRENCY = 32, 4


def serve(
    url: Annotated[str, typer.Option(help="Base URL of the endpoint.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name. Default: the endpoint's first model.")] = None,
    num_requests: Annotated[
        int | None, typer.Option(help=f"Number of requests. Default: {NUM_REQUESTS}, or the entire trace.", min=1)
    ] = None,
    input_len: Annotated[int, typer.Option(help="Input tokens per request. Ignored with --trace.", min=1)] = 512,
    output_len: Annotated[int, typer.Option(help="Output tokens per request. Ignored with --trace.", min=1)] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help=f"Maximum number of requests in flight. Default: {CONCURRENCY}, or unlimited with --request-rate "
            "or --trace.",
            min=1,
        ),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean number of requests per second, with Poisson arrivals.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake trace to replay, with its lengths, arrival times and common prefixes.")
    ] = None,
    trace_scale: Annotated[float, typer.Option(help="Factor for the trace's lengths.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Factor for the trace's arrival rate.")] = 1.0,
    trace_out: Annotated[
        typer.FileBinaryWrite | None,
        typer.Option(
            help="File for a Perfetto trace of the middle request on all ranks.", lazy=False, metavar="<path>"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Benchmark the latency, throughput and cache hits of a running endpoint."""
    if trace is not None:
        entries = read_trace(trace, num_requests)
        workload = trace_workload(entries, scale=trace_scale, speed=trace_speed, concurrency=concurrency)
    else:
        workload = random_workload(
            num_requests=num_requests or NUM_REQUESTS,
            input_len=input_len,
            output_len=output_len,
            concurrency=CONCURRENCY if concurrency is None and request_rate is None else concurrency,
            request_rate=request_rate,
        )
    served, records = _measure(url, model, workload, traced=trace_out is not None)
    report = summarize(records)
    if as_json:
        print(json.dumps({"url": url, "model": served, "workload": workload.title, **dataclasses.asdict(report)}))
    else:
        _print_report(f"{served}: {workload.title}", report)
    if report.completed == 0:
        fail(f"no request succeeded: {', '.join(report.errors)}")
    if trace_out is not None:
        _write_trace(url, records[len(records) // 2], trace_out)


def _measure(url: str, model: str | None, workload: Workload, *, traced: bool) -> tuple[str, list[RequestRecord]]:
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
        fail("interrupted", 130)


def _write_trace(url: str, record: RequestRecord, file: typer.FileBinaryWrite) -> None:
    try:
        file.write(fetch_trace(url, record))
    except (httpx.HTTPError, EndpointError) as error:
        fail(f"{url}: {error}")
    print(f"trace: {file.name}; open it at https://ui.perfetto.dev", file=sys.stderr)


def _print_report(title: str, report: Report) -> None:
    latencies = {
        "time to first token (TTFT)": report.ttft_ms,
        "time per output token (TPOT)": report.tpot_ms,
        "inter-token latency (ITL)": report.itl_ms,
        "end-to-end latency (E2EL)": report.e2el_ms,
    }
    print_table(title, ({"milliseconds": name} | dataclasses.asdict(it) for name, it in latencies.items() if it))
    print(
        f"{report.completed} completed, {report.failed} failed in {report.duration_s:.2f} s: "
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s, "
        f"{report.total_tokens_per_s:.1f} total tokens/s, cache hit rate {report.hit_rate:.2%}"
    )
    for error, count in report.errors.items():
        print(f"{count} x {error}")
