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

from cluster.bench.load import StreamError, fetch_trace, run_load
from cluster.bench.statistics import GOODPUT_METRICS, Report, RequestRecord, parse_goodput, summarize
from cluster.bench.trace import infinite_cache_hits, read_trace, trace_workload
from cluster.bench.workload import Workload, random_workload
from cluster.cli.bench import fail, print_table
from cluster.spec.errors import UserError

DEFAULT_URL = "http://127.0.0.1:8000"
NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN, CONCURRENCY = 32, 512, 64, 4
PAGE_SIZE = 64


def serve(
    url: Annotated[str, typer.Option(help="Base URL of the endpoint.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model name; by default the endpoint's first.")] = None,
    num_requests: Annotated[
        int | None, typer.Option(help=f"Number of requests; {NUM_REQUESTS}, or the whole trace, by default.", min=1)
    ] = None,
    input_len: Annotated[int | None, typer.Option(help=f"Input tokens per request; {INPUT_LEN} by default.")] = None,
    output_len: Annotated[int | None, typer.Option(help=f"Output tokens per request; {OUTPUT_LEN} by default.")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help=f"Maximum number of requests in flight; {CONCURRENCY} by default, unlimited with arrival times."
        ),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean requests per second, with Poisson arrivals, instead of a closed loop.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay a trace in Mooncake's format: lengths, arrivals, common prefixes.")
    ] = None,
    trace_scale: Annotated[float | None, typer.Option(help="Multiplier of the trace's lengths; 1 by default.")] = None,
    trace_speed: Annotated[float | None, typer.Option(help="Speed-up of the trace's arrivals; 1 by default.")] = None,
    page_size: Annotated[
        int | None, typer.Option(help=f"Page size for the trace's ideal hit rate; {PAGE_SIZE} by default.", min=1)
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(help=f"Latency objectives in ms, such as ttft:500,tpot:50, of {', '.join(GOODPUT_METRICS)}."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Upper bound of the token ids of prompts.")] = 4096,
    seed: Annotated[int, typer.Option(help="Random seed for prompts and arrival times.")] = 0,
    warmup: Annotated[int, typer.Option(help="Number of warm-up requests.", min=0)] = 1,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Maximum seconds without data from the endpoint.")
    ] = 600.0,
    trace_out: Annotated[
        Path | None, typer.Option(help="Write a trace of the middle request on all ranks, for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Benchmark a running endpoint: latency, throughput and cache hits."""
    common = {"vocab_size": vocab_size, "seed": seed}
    if trace is None:
        _refuse("needs --trace", trace_scale=trace_scale, trace_speed=trace_speed, page_size=page_size)
        workload = random_workload(
            num_requests=_or(num_requests, NUM_REQUESTS),
            input_len=_or(input_len, INPUT_LEN),
            output_len=_or(output_len, OUTPUT_LEN),
            concurrency=CONCURRENCY if concurrency is None and request_rate is None else concurrency,
            request_rate=request_rate,
            **common,
        )
    else:
        _refuse("excludes --trace", input_len=input_len, output_len=output_len, request_rate=request_rate)
        entries = read_trace(trace, num_requests)
        scale, speed = (1.0 if value is None else value for value in (trace_scale, trace_speed))
        workload = trace_workload(entries, scale=scale, speed=speed, concurrency=concurrency, **common)
    goodput_ms = None if goodput is None else parse_goodput(goodput)
    _check_can_write(trace_out)
    served, records = _measure(url, model, workload, warmup, timeout_s, traced=trace_out is not None)
    report = summarize(records, goodput_ms)
    ideal = None if trace is None else _ideal_hit_rate(workload, records, page_size or PAGE_SIZE)
    if as_json:
        settings = {"url": url, "model": served, **workload.settings, "goodput_ms": goodput_ms}
        print(json.dumps(settings | dataclasses.asdict(report) | {"infinite_cache_hit_rate": ideal}))
    else:
        _print_report(f"{served}: {workload.title}", report, ideal)
    if report.completed == 0:
        fail(f"no request succeeded: {', '.join(report.errors)}")
    if trace_out is not None:
        _write_trace(url, records[len(records) // 2], trace_out)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _refuse(why: str, **options: float | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"--{name.replace('_', '-')}: got {value}; this option {why}")


def _check_can_write(path: Path | None) -> None:
    """Find out before the run; leaves no file behind."""
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
    url: str, model: str | None, workload: Workload, num_warmup: int, timeout_s: float, *, traced: bool
) -> tuple[str, list[RequestRecord]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("requests", total=len(workload.requests))
            return asyncio.run(
                run_load(
                    url,
                    model,
                    workload,
                    num_warmup=num_warmup,
                    timeout_s=timeout_s,
                    traced=traced,
                    on_progress=lambda: progress.advance(task),
                )
            )
    except (httpx.HTTPError, httpx.InvalidURL, StreamError) as error:
        fail(f"{url}: {error}")
    except KeyboardInterrupt:
        fail("interrupted; nothing is reported", 130)


def _write_trace(url: str, record: RequestRecord, path: Path) -> None:
    try:
        path.write_bytes(fetch_trace(url, record))
    except (httpx.HTTPError, StreamError) as error:
        fail(f"{url}: {error}")
    print(f"trace: {path}; open it at https://ui.perfetto.dev", file=sys.stderr)


def _ideal_hit_rate(workload: Workload, records: Sequence[RequestRecord], page_size: int) -> float:
    """Return the hit rate that an unbounded cache would have had on the prompts of successful requests."""
    requests = zip(workload.requests, records, strict=True)
    prompts = [request.make_prompt() for request, record in requests if record.error is None]
    return sum(infinite_cache_hits(prompts, page_size)) / max(1, sum(map(len, prompts)))


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
