"""`baton bench serve`: measures a running endpoint. The load is in cluster/bench; here are options and output."""

import asyncio
import dataclasses
import json
import sys
from typing import Annotated, NoReturn

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.bench.client import StreamError
from cluster.bench.load import run_load
from cluster.bench.statistics import Quantiles, Report, RequestRecord, summarize
from cluster.bench.workload import Workload

DEFAULT_URL = "http://127.0.0.1:8000"

bench = typer.Typer(help="Measure a running cluster, or the engine alone.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure a running cluster, or the engine alone."""


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Endpoint to measure.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model name; the endpoint's first by default.")] = None,
    num_requests: Annotated[int, typer.Option(help="Requests to measure.")] = 32,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt, drawn at random.")] = 512,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    concurrency: Annotated[
        int | None, typer.Option(help="Most requests open at once; 4 without --request-rate, no limit with it.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean arrivals per second (Poisson) instead of a closed loop.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Token ids of prompts are below this.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    warmup: Annotated[int, typer.Option(help="Requests sent first and not measured.", min=0)] = 1,
    timeout_s: Annotated[float, typer.Option(help="Longest silence of a stream, in seconds.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send random prompts to /v1/completions and report latency and throughput."""
    workload = Workload(
        num_requests=num_requests,
        input_len=input_len,
        output_len=output_len,
        concurrency=4 if concurrency is None and request_rate is None else concurrency,
        request_rate=request_rate,
        vocab_size=vocab_size,
        seed=seed,
    )
    served, report = _measure(url, model, workload, warmup, timeout_s)
    if as_json:
        settings = {"url": url, "model": served, **dataclasses.asdict(workload)}
        print(json.dumps(settings | dataclasses.asdict(report)))
    else:
        _print_report(served, workload, report)
    if report.completed == 0:
        fail(f"no request succeeded: {', '.join(report.errors)}", 1)


def _measure(url: str, model: str | None, workload: Workload, num_warmup: int, timeout_s: float) -> tuple[str, Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("requests", total=workload.num_requests)

            def advance(_: RequestRecord) -> None:
                progress.advance(task)

            served, records = asyncio.run(
                run_load(url, model, workload, num_warmup=num_warmup, timeout_s=timeout_s, on_progress=advance)
            )
    except (httpx.HTTPError, httpx.InvalidURL, StreamError) as error:
        fail(f"{url}: {error}", 1)
    except KeyboardInterrupt:
        fail("interrupted; nothing is reported", 130)
    return served, summarize(records)


def _print_report(model: str, workload: Workload, report: Report) -> None:
    loop = f"at {workload.request_rate:g} requests/s" if workload.request_rate else "closed loop"
    limit = f"at most {workload.concurrency} at once" if workload.concurrency else "no limit at once"
    table = Table(
        title=f"{model}: {workload.num_requests} requests of {workload.input_len}/{workload.output_len} tokens, "
        f"{loop}, {limit}",
        title_justify="left",
    )
    for column in ("milliseconds", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for name, quantiles in _latencies(report):
        table.add_row(name, *(f"{value:.2f}" for value in dataclasses.astuple(quantiles)))
    console = Console()
    console.print(table)
    console.print(
        f"{report.completed} completed, {report.failed} failed in {report.duration_s:.2f} s: "
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s, "
        f"{report.total_tokens_per_s:.1f} tokens/s in all",
        highlight=False,
    )
    for error, count in report.errors.items():
        console.print(f"{count} x {error}", markup=False, highlight=False)


def _latencies(report: Report) -> list[tuple[str, Quantiles]]:
    named = (
        ("time to first token", report.ttft_ms),
        ("time per output token", report.tpot_ms),
        ("between pieces (ITL)", report.itl_ms),
        ("whole request", report.e2e_ms),
    )
    return [(name, quantiles) for name, quantiles in named if quantiles is not None]


def fail(message: str, code: int) -> NoReturn:
    """Say on stderr why the command ends, and end it."""
    print(f"baton bench: {message}", file=sys.stderr)
    raise typer.Exit(code)
