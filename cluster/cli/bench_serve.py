"""Options and output of `baton bench serve`. The load generator is in cluster/bench."""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cluster.bench.dataset import PromptEntry, read_dataset
from cluster.bench.endpoint import ENDPOINT_ERRORS, EndpointError, count_tokens, first_model, key_headers
from cluster.bench.load import Goals, Report, RequestRecord, fetch_trace, run_load, summarize
from cluster.bench.workload import TraceEntry, Workload, random_workload, text_workload, trace_workload
from cluster.cli.bench import Json, fail, print_table
from cluster.cli.chat import Url
from cluster.cli.commands import Cluster
from cluster.cli.running import endpoint_url
from cluster.spec.errors import UserError

NUM_REQUESTS, CONCURRENCY = 32, 4

NumRequests = Annotated[
    int | None, typer.Option(help=f"Number of requests. Default: {NUM_REQUESTS}, or the entire dataset.", min=1)
]
InputLen = Annotated[int, typer.Option(help="Tokens of each random prompt.", min=1)]
OutputLen = Annotated[int, typer.Option(help="Output tokens per request, unless the dataset has their number.", min=1)]
Concurrency = Annotated[
    int | None,
    typer.Option(
        help=f"Maximum number of requests in flight. Default: {CONCURRENCY}, or unlimited with --request-rate "
        "or a trace.",
        min=1,
    ),
]
RequestRate = Annotated[float | None, typer.Option(help="Mean number of requests per second, with Poisson arrivals.")]
Dataset = Annotated[
    Path | None,
    typer.Option(
        help="File of requests instead of random prompts: a Mooncake trace (replayed with its lengths, arrival "
        'times and common prefixes), ShareGPT conversations, or JSON lines with "prompt" and "output_len".'
    ),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LATENCY:MS",
        help="Report goodput: requests per second within this latency, as in ttft:2000, tpot:50 or e2el:9000. "
        "Repeatable.",
    ),
]


def _writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before anything is measured. Its content stays until then."""
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        raise typer.BadParameter(f"{str(path)!r}: {error.strerror}") from None
    return path


Save = Annotated[Path | None, typer.Option(help="JSON file for the report and all requests.", callback=_writable)]
TraceOut = Annotated[
    Path | None,
    typer.Option(help="File for a Perfetto trace of the middle request on all ranks.", callback=_writable),
]


def serve(
    url: Url = None,
    cluster: Cluster = None,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the endpoint's first model.")] = None,
    num_requests: NumRequests = None,
    input_len: InputLen = 512,
    output_len: OutputLen = 64,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    dataset: Dataset = None,
    trace_scale: Annotated[float, typer.Option(help="Factor for a trace's lengths.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Factor for a trace's arrival rate.")] = 1.0,
    goodput: Goodput = None,
    save: Save = None,
    trace_out: TraceOut = None,
    as_json: Json = False,
) -> None:
    """Benchmark the latency, throughput and cache hits of a running endpoint."""
    goals = _goals(goodput) if goodput else None
    entries = [] if dataset is None else read_dataset(dataset, num_requests)
    if (trace_scale, trace_speed) != (1.0, 1.0) and not any(isinstance(entry, TraceEntry) for entry in entries):
        raise UserError("--trace-scale, --trace-speed: allowed only with a trace, as --dataset")
    load = _Load(
        entries=entries,
        name="" if dataset is None else dataset.name,
        num_requests=num_requests or NUM_REQUESTS,
        input_len=input_len,
        output_len=output_len,
        concurrency=concurrency,
        request_rate=request_rate,
        trace_scale=trace_scale,
        trace_speed=trace_speed,
    )
    url = endpoint_url(url, cluster)
    served, workload, records = _measure(url, model, load, traced=trace_out is not None)
    report = summarize(records, goals)
    result = {"url": url, "model": served, "workload": workload.title, **dataclasses.asdict(report)}
    if as_json:
        print(json.dumps(result))
    else:
        _print_report(f"{served}: {workload.title}", report)
    if save is not None:
        requests = [dataclasses.asdict(record) for record in records]
        _write(save, f"{json.dumps(result | {'requests': requests})}\n".encode())
    if len(records) < len(workload.requests):
        fail(f"interrupted after {len(records)} of {len(workload.requests)} requests", 130)
    if report.completed == 0:
        fail(f"no request succeeded: {', '.join(report.errors)}")
    if trace_out is not None:
        _write_trace(url, records[len(records) // 2], trace_out)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """Options for the requests. The endpoint is needed to count the tokens of answers in a dataset."""

    entries: Sequence[TraceEntry | PromptEntry]
    """Requests of the dataset; empty for random prompts."""
    name: str
    num_requests: int
    input_len: int
    output_len: int
    concurrency: int | None
    request_rate: float | None
    trace_scale: float
    trace_speed: float

    def plan(self, client: httpx.Client, model: str) -> Workload:
        trace = [entry for entry in self.entries if isinstance(entry, TraceEntry)]
        if trace:
            return trace_workload(trace, scale=self.trace_scale, speed=self.trace_speed, concurrency=self.concurrency)
        rate = self.request_rate
        limit = CONCURRENCY if self.concurrency is None and rate is None else self.concurrency
        texts = [entry for entry in self.entries if isinstance(entry, PromptEntry)]
        if texts:
            lengths = _with_lengths(client, model, texts, self.output_len)
            return text_workload(lengths, name=self.name, concurrency=limit, request_rate=rate)
        return random_workload(
            num_requests=self.num_requests,
            input_len=self.input_len,
            output_len=self.output_len,
            concurrency=limit,
            request_rate=rate,
        )


def _goals(given: Sequence[str]) -> Goals:
    goals = Goals()
    for text in given:
        name, _, number = text.partition(":")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = 0.0
        if name not in Goals._fields or not limit_ms > 0:
            raise UserError(f"--goodput: got {text!r}; allowed: {', '.join(f'{it}:MS' for it in Goals._fields)}")
        goals = goals._replace(**{name: limit_ms})
    return goals


def _with_lengths(
    client: httpx.Client, model: str, texts: Sequence[PromptEntry], default: int
) -> list[tuple[str, int]]:
    """Return prompts and lengths of answers. The endpoint counts the tokens of answers that are texts."""
    return [
        (entry.prompt, entry.output_len or (count_tokens(client, model, entry.answer) if entry.answer else default))
        for entry in texts
    ]


def _measure(url: str, model: str | None, load: _Load, *, traced: bool) -> tuple[str, Workload, list[RequestRecord]]:
    try:
        with httpx.Client(base_url=url, timeout=60.0, headers=key_headers()) as client:
            model = model or first_model(client)
            workload = load.plan(client, model)
        return model, workload, _run(url, model, workload, traced=traced)
    except UserError:  # a wrong option
        raise
    except ENDPOINT_ERRORS as error:
        fail(f"{url}: {error}")
    except KeyboardInterrupt:
        fail("interrupted", 130)


def _run(url: str, model: str, workload: Workload, *, traced: bool) -> list[RequestRecord]:
    """Return one record per request in their order or, after Ctrl-C, the records of those that have finished."""
    finished: list[RequestRecord] = []
    try:
        with _progress(len(workload.requests), finished) as on_progress:
            return asyncio.run(run_load(url, model, workload, traced=traced, on_progress=on_progress))
    except KeyboardInterrupt:
        if not finished:
            raise
        return finished


@contextmanager
def _progress(num_requests: int, finished: list[RequestRecord]) -> Iterator[Callable[[RequestRecord], None]]:
    """Collect finished requests, and show their number, the rate of output tokens so far, and the remaining time."""
    columns = (
        *(TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")),
        *(TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, start_s, num_tokens = progress.add_task("", total=num_requests), time.monotonic(), 0

        def on_progress(record: RequestRecord) -> None:
            nonlocal num_tokens
            finished.append(record)
            num_tokens += record.num_output_tokens
            rate = num_tokens / (time.monotonic() - start_s)
            progress.update(task, advance=1, description=f"{rate:,.0f} output tokens/s")

        yield on_progress


def _write_trace(url: str, record: RequestRecord, path: Path) -> None:
    try:
        trace = fetch_trace(url, record)
    except (httpx.HTTPError, EndpointError) as error:
        fail(f"{url}: {error}")
    _write(path, trace)
    print(f"trace: {path}; open it at https://ui.perfetto.dev", file=sys.stderr)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:  # such as a full disk
        fail(f"{path}: {error.strerror}")


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
    if report.goodput is not None:
        print(f"goodput: {report.goodput:.2f} requests/s reach all goals")
    for error, count in report.errors.items():
        print(f"{count} x {error}")
