"""`baton bench router`: options and output; the measuring is in cluster/bench/router_speed.py."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench import fail
from cluster.cli.bench_cp import parse_list

if TYPE_CHECKING:
    from cluster.bench.router_speed import RouterResult


def router(
    prompt_len: Annotated[str, typer.Option(help="Token ids of each prompt, several by commas.")] = "32,8192",
    connections: Annotated[int, typer.Option(help="Clients of short answers, each with one request at a time.")] = 32,
    streams: Annotated[int, typer.Option(help="Streams at once.")] = 64,
    stream_len: Annotated[int, typer.Option(help="Tokens of each stream.")] = 256,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 5.0,
    known_share: Annotated[float, typer.Option(help="Part of the requests whose prompt was served before.")] = 0.5,
    model: Annotated[str, typer.Option(help="Model whose tokenizer is used.")] = "recall",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure a router before replicas that answer at once: the time it adds, and the load it carries."""
    # Imported here: the command line starts quickly because each command loads what it needs.
    from cluster.bench.http_load import LoadError
    from cluster.bench.router_speed import RouterBench, run_router_bench
    from workers.models.resolve import DESCRIPTION, resolve_model
    from workers.worker_process import RemoteError

    bench = RouterBench(
        model_folder=resolve_model(model, DESCRIPTION),
        prompt_lens=parse_list("--prompt-len", prompt_len, int, "whole numbers"),
        num_connections=connections,
        num_streams=streams,
        stream_len=stream_len,
        seconds=seconds,
        known_share=known_share,
    )
    try:
        for result in run_router_bench(bench):
            print(json.dumps(dataclasses.asdict(result)) if as_json else _sentence(result), flush=True)
    except (LoadError, RemoteError) as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def _sentence(result: "RouterResult") -> str:
    cores = ", ".join(f"{name} {cores:g}" for name, cores in result.request_cores.items())
    return (
        f"prompts of {result.prompt_len} tokens: added {result.added_p50_ms:.2f} ms (p50), "
        f"{result.added_p99_ms:.2f} ms (p99) at half load, to {result.direct_p50_ms:.2f} and "
        f"{result.direct_p99_ms:.2f} ms without it; {result.req_per_s:.0f} requests/s, "
        f"{result.stream_tok_per_s:.0f} streamed tokens/s; cores at full load: {cores}"
    )
