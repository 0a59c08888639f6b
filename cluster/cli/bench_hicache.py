"""`baton bench hicache`: options and output; the measuring is in cluster/bench/hicache.py and hicache_load.py."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from cluster.bench.trace import TraceWorkload, read_trace
from cluster.cli.bench import fail
from cluster.cli.bench_cp import parse_list
from cluster.spec.errors import UserError
from cluster.spec.tiers import Tier

if TYPE_CHECKING:
    from cluster.bench.hicache import HicacheResult
    from cluster.bench.hicache_load import LoadResult

R = TypeVar("R", "HicacheResult", "LoadResult")

_HIT_COLUMNS = ("tier", "cached", "of tokens", "first token ms", "computed ms", "share")
_LOAD_COLUMNS = ("lowest tier", "hits", "from host", "storage", "endless cache", "prompt tokens/s", "gain")


def hicache(
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt; of a conversation's last.")] = 16384,
    hits: Annotated[str, typer.Option(help="Cached parts of it in percent, several by commas.")] = "0,50,90,100",
    tiers: Annotated[str, typer.Option(help="Where they are: device, host, storage.")] = "device,host,storage",
    cp: Annotated[int, typer.Option(help="CP ranks of the prefill replica.")] = 1,
    rounds: Annotated[int, typer.Option(help="Measurements of each; medians are reported.")] = 5,
    conversations: Annotated[
        int | None, typer.Option(help="Instead, so many conversations side by side: hit rates and gain of each tier.")
    ] = None,
    turns: Annotated[int, typer.Option(help="Of each conversation.")] = 4,
    trace: Annotated[
        Path | None, typer.Option(help="Instead, the requests of a trace in Mooncake's format, as fast as they go.")
    ] = None,
    trace_scale: Annotated[float, typer.Option(help="Lengths of the trace are multiplied by this.")] = 1.0,
    num_requests: Annotated[
        int | None, typer.Option(help="Of the trace, so many from its beginning; all by default.", min=1)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests of conversations or a trace at once.", min=1)] = 4,
    model: Annotated[str, typer.Option(help="Folder, Hugging Face repository, or recall.")] = "recall",
    kv_gib: Annotated[float, typer.Option(help="Page pool of each worker, in GiB; room for two prompts.")] = 1.0,
    host_gib: Annotated[float, typer.Option(help="Host memory of each worker, in GiB.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Time to first token of prompts whose beginning is cached, beside computing them, in plain processes."""
    # Imported here: the command line starts quickly because each command loads what it needs.
    from cluster.bench.hicache import HicacheBench, TierSizes, run_hicache_bench
    from cluster.bench.hicache_load import Conversations, TracedRequests, run_load_bench
    from workers.models.resolve import resolve_model

    if conversations is not None and trace is not None:
        raise UserError(f"--trace: got {trace} beside --conversations {conversations}; allowed: one of them")
    sizes = TierSizes(cp=cp, kv_gib=kv_gib, host_gib=host_gib)
    if trace is not None:
        requests = TraceWorkload(read_trace(trace, num_requests), trace_scale)
        workload = TracedRequests(trace=requests, concurrency=concurrency)
        _show(run_load_bench(sizes, workload, resolve_model(model)), _LOAD_COLUMNS, _load_row, as_json=as_json)
    elif conversations is not None:
        talks = Conversations(
            num_conversations=conversations, num_turns=turns, prompt_len=prompt_len, concurrency=concurrency
        )
        _show(run_load_bench(sizes, talks, resolve_model(model)), _LOAD_COLUMNS, _load_row, as_json=as_json)
    else:
        bench = HicacheBench(
            prompt_len=prompt_len,
            hits=parse_list("--hits", hits, int, "whole numbers"),
            tiers=parse_list("--tiers", tiers, Tier, ", ".join(Tier)),
            num_rounds=rounds,
            sizes=sizes,
        )
        _show(run_hicache_bench(bench, resolve_model(model)), _HIT_COLUMNS, _hit_row, as_json=as_json)


def _show(results: Iterable[R], columns: Sequence[str], row_of: Callable[[R], list[str]], *, as_json: bool) -> None:
    """Measure, and print each result as it comes, or all as a table."""
    from workers.worker_process import RemoteError

    try:
        if as_json:
            for result in results:
                print(json.dumps(dataclasses.asdict(result)), flush=True)
        else:
            table = Table(*columns)
            for result in results:
                table.add_row(*row_of(result))
            Console().print(table)
    except RemoteError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def _hit_row(result: "HicacheResult") -> list[str]:
    lengths = [f"{result.cached_len}", f"{result.prompt_len}"]
    return [result.tier, *lengths, f"{result.ttft_s * 1e3:.1f}", f"{result.cold_s * 1e3:.1f}", f"{result.share:.1%}"]


def _load_row(result: "LoadResult") -> list[str]:
    rates = (result.hit_rate, result.host_rate, result.storage_rate, result.best_hit_rate)
    speed = f"{result.prompt_tokens / result.seconds:.0f}"
    return [result.lowest_tier, *(f"{rate:.1%}" for rate in rates), speed, f"{result.gain:.2f}"]
