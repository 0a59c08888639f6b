"""`baton bench hicache`: options and output; the measuring is in cluster/bench/hicache.py."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench import fail
from cluster.cli.bench_cp import parse_list
from cluster.spec.tiers import Tier

if TYPE_CHECKING:
    from cluster.bench.hicache import HicacheResult


def hicache(
    prompt_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 16384,
    hits: Annotated[str, typer.Option(help="Cached parts of it in percent, several by commas.")] = "50,90,100",
    tiers: Annotated[str, typer.Option(help="Where they are: device, host, storage.")] = "device,host,storage",
    cp: Annotated[int, typer.Option(help="CP ranks of the prefill replica.")] = 1,
    rounds: Annotated[int, typer.Option(help="Measurements of each; medians are reported.")] = 5,
    model: Annotated[str, typer.Option(help="Folder, Hugging Face repository, or recall.")] = "recall",
    kv_gib: Annotated[float, typer.Option(help="Page pool of each worker, in GiB; room for two prompts.")] = 1.0,
    host_gib: Annotated[float, typer.Option(help="Host memory of each prefill worker, in GiB.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Time to first token of prompts whose beginning is cached, beside computing them, in plain processes."""
    # Imported here: the command line starts quickly because each command loads what it needs.
    from cluster.bench.hicache import HicacheBench, run_hicache_bench
    from workers.local import RemoteError
    from workers.models.resolve import resolve_model

    bench = HicacheBench(
        prompt_len=prompt_len,
        hits=parse_list("--hits", hits, int, "whole numbers"),
        tiers=parse_list("--tiers", tiers, Tier, ", ".join(Tier)),
        cp=cp,
        num_rounds=rounds,
        kv_gib=kv_gib,
        host_gib=host_gib,
    )
    try:
        results = run_hicache_bench(bench, resolve_model(model))
        if as_json:
            for result in results:
                print(json.dumps(dataclasses.asdict(result) | {"share": result.share}), flush=True)
        else:
            _print_table(list(results))
    except RemoteError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def _print_table(results: "list[HicacheResult]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("tier", "cached", "of tokens", "first token ms", "computed ms", "share")
    for result in results:
        table.add_row(
            result.tier,
            f"{result.cached_len}",
            f"{result.prompt_len}",
            f"{result.ttft_s * 1e3:.1f}",
            f"{result.cold_s * 1e3:.1f}",
            f"{result.share:.1%}",
        )
    Console().print(table)
