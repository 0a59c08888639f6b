"""`baton bench serve`: measures a running endpoint. The load is in cluster/bench, the tables in bench_tables.py."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.bench.client import StreamError
from cluster.bench.load import LoadResult, fetch_timeline, run_load
from cluster.bench.statistics import Report, RequestRecord, summarize
from cluster.bench.trace import TraceWorkload, infinite_cache_hits, read_trace
from cluster.bench.workload import RandomWorkload, Workload
from cluster.cli.bench_tables import print_report
from cluster.spec.errors import UserError

DEFAULT_URL = "http://127.0.0.1:8000"
NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN, CONCURRENCY = 32, 512, 64, 4
PAGE_SIZE = 64

bench = typer.Typer(help="Measure a running cluster, or the engine alone.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure a running cluster, or the engine alone."""


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Endpoint to measure.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model name; the endpoint's first by default.")] = None,
    num_requests: Annotated[
        int | None, typer.Option(help=f"Requests to measure; {NUM_REQUESTS}, or the whole trace, by default.", min=1)
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(help=f"Tokens of each prompt, drawn at random; {INPUT_LEN} by default.")
    ] = None,
    output_len: Annotated[int | None, typer.Option(help=f"Tokens of each answer; {OUTPUT_LEN} by default.")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help=f"Most requests open at once; {CONCURRENCY} by default, no limit with arrival times."),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean arrivals per second (Poisson) instead of a closed loop.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace in Mooncake's format: lengths, arrivals, common prefixes.")
    ] = None,
    trace_scale: Annotated[
        float | None, typer.Option(help="Lengths of the trace are multiplied by this; 1 by default.")
    ] = None,
    trace_speed: Annotated[
        float | None, typer.Option(help="Requests of the trace arrive so many times as fast; 1 by default.")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(help=f"The endpoint's, for a trace's best hit rate; {PAGE_SIZE} by default.", min=1)
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Token ids of prompts are below this.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    warmup: Annotated[int, typer.Option(help="Requests sent first and not measured.", min=0)] = 1,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Longest silence of a stream, in seconds.")] = 600.0,
    trace_out: Annotated[
        Path | None, typer.Option(help="Write the timeline of the middle request over all ranks, for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send prompts to /v1/completions and report latency, throughput and cache hits."""
    workload: Workload
    if trace is None:
        _refuse("only a trace has it", trace_scale=trace_scale, trace_speed=trace_speed, page_size=page_size)
        workload = _random_workload(num_requests, input_len, output_len, concurrency, request_rate, vocab_size, seed)
    else:
        _refuse("a trace has its own", input_len=input_len, output_len=output_len, request_rate=request_rate)
        entries = read_trace(trace, num_requests)
        scale, speed = (1.0 if value is None else value for value in (trace_scale, trace_speed))
        workload = TraceWorkload(entries, scale, speed, concurrency, vocab_size, seed)
    _check_can_write(trace_out)
    result = _measure(url, model, workload, warmup, timeout_s, timed=trace_out is not None)
    report = summarize(result.records)
    best_hit_rate = _best_hit_rate(workload, result.records, page_size or PAGE_SIZE) if trace is not None else None
    if as_json:
        _print_json({"url": url, "model": result.model, **workload.settings()}, report, best_hit_rate)
    else:
        print_report(f"{result.model}: {workload.describe()}", report, best_hit_rate)
    if report.completed == 0:
        fail(f"no request succeeded: {', '.join(report.errors)}", 1)
    if trace_out is not None:
        _write_timeline(url, result.timed, trace_out)


def _print_json(settings: dict[str, Any], report: Report, best_hit_rate: float | None) -> None:
    print(json.dumps(settings | dataclasses.asdict(report) | {"infinite_cache_hit_rate": best_hit_rate}))


def _random_workload(
    num_requests: int | None,
    input_len: int | None,
    output_len: int | None,
    concurrency: int | None,
    request_rate: float | None,
    vocab_size: int,
    seed: int,
) -> RandomWorkload:
    return RandomWorkload(
        num_requests=NUM_REQUESTS if num_requests is None else num_requests,
        input_len=INPUT_LEN if input_len is None else input_len,
        output_len=OUTPUT_LEN if output_len is None else output_len,
        concurrency=CONCURRENCY if concurrency is None and request_rate is None else concurrency,
        request_rate=request_rate,
        vocab_size=vocab_size,
        seed=seed,
    )


def _refuse(why: str, **options: float | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"--{name.replace('_', '-')}: got {value}, but {why}; leave it out")


def _check_can_write(path: Path | None) -> None:
    """Find out before the run, not after it; leaves nothing behind."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(f"--trace-out: cannot write {path}: {error.strerror}") from error


def _measure(
    url: str, model: str | None, workload: Workload, num_warmup: int, timeout_s: float, *, timed: bool
) -> LoadResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("requests", total=len(workload.requests()))

            def advance(_: RequestRecord) -> None:
                progress.advance(task)

            return asyncio.run(
                run_load(
                    url,
                    model,
                    workload,
                    num_warmup=num_warmup,
                    timeout_s=timeout_s,
                    timed=timed,
                    on_progress=advance,
                )
            )
    except (httpx.HTTPError, httpx.InvalidURL, StreamError) as error:
        fail(f"{url}: {error}", 1)
    except KeyboardInterrupt:
        fail("interrupted; nothing is reported", 130)


def _write_timeline(url: str, record: RequestRecord, path: Path) -> None:
    try:
        path.write_bytes(fetch_timeline(url, record))
    except (httpx.HTTPError, StreamError) as error:
        fail(f"{url}: {error}", 1)
    print(f"timeline: {path}; open it at https://ui.perfetto.dev", file=sys.stderr)


def _best_hit_rate(workload: Workload, records: list[RequestRecord], page_size: int) -> float:
    """What a cache of unlimited size would have had of the prompts that were answered."""
    requests = zip(workload.requests(), records, strict=True)
    prompts = [request.make_prompt() for request, record in requests if record.error is None]
    return sum(infinite_cache_hits(prompts, page_size)) / max(1, sum(map(len, prompts)))


def fail(message: str, code: int) -> NoReturn:
    """Say on stderr why the command ends, and end it."""
    print(f"baton bench: {message}", file=sys.stderr)
    raise typer.Exit(code)
