"""`baton bench cp`: options and output; the measuring is in cluster/bench/cp.py."""

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from cluster.cli.bench import fail
from cluster.spec.errors import UserError
from cluster.spec.strategy import Collectives, CpMode, PassingSetting, StrategySetting

if TYPE_CHECKING:
    from cluster.bench.cp import CpBench
    from cluster.bench.cp_result import CpResult

T = TypeVar("T")

DEFAULT_STRATEGIES = "none,contiguous,zigzag,auto"
_NAMES = ("mode", "strategy", "ran as")
_FIGURES = ("prefill\nms", "estimate\nms", "effi-\nciency", "in at-\ntention", "exposed", "KV MiB\na rank")
_WIDTH = 118
"""Of the table where no terminal says how much there is."""


def cp(
    prompt_len: Annotated[str, typer.Option(help="Tokens of the prompt, several by commas.")] = "2048,8192",
    cp: Annotated[str, typer.Option(help="CP ranks, several by commas; one rank alone is always measured.")] = "1,2",
    strategy: Annotated[str, typer.Option(help="Strategies or auto, several by commas.")] = DEFAULT_STRATEGIES,
    mode: Annotated[str, typer.Option(help="gather or ring, several by commas.")] = "gather",
    passing: Annotated[str, typer.Option(help="In ring mode: auto, pass_kv or pass_q, several by commas.")] = "auto",
    prefix_len: Annotated[str, typer.Option(help="Tokens that are cached before the prompt, several by commas.")] = "0",
    collectives: Annotated[
        str, typer.Option(help="auto: through shared memory here; or tcp, as between hosts.")
    ] = "auto",
    rounds: Annotated[int, typer.Option(help="Measurements of each; medians are reported.")] = 5,
    layers: Annotated[int, typer.Option(help="Layers of the model, whose weights are random.")] = 8,
    hidden_size: Annotated[int, typer.Option(help="Width; the feed-forward part is three times as wide.")] = 512,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of weights and KV: bfloat16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Time one prefill step over CP ranks, one thread each, in plain processes of this machine."""
    # Imported here: the command line starts quickly because each command loads what it needs.
    from cluster.bench.cp import CpBench, run_cp_bench
    from cluster.bench.model_size import ModelSize
    from workers.worker_process import RemoteError

    bench = CpBench(
        prompt_lens=parse_list("--prompt-len", prompt_len, int, "whole numbers"),
        cps=parse_list("--cp", cp, int, "whole numbers"),
        strategies=parse_list("--strategy", strategy, StrategySetting, ", ".join(StrategySetting)),
        modes=parse_list("--mode", mode, CpMode, ", ".join(CpMode)),
        passings=parse_list("--passing", passing, PassingSetting, ", ".join(PassingSetting)),
        prefix_lens=parse_list("--prefix-len", prefix_len, int, "whole numbers"),
        collectives=parse_one("--collectives", collectives, Collectives, ", ".join(Collectives)),
        num_rounds=rounds,
        model=ModelSize(
            num_layers=layers,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        ),
    )
    try:
        if as_json:
            for result in run_cp_bench(bench):
                print(json.dumps(dataclasses.asdict(result)), flush=True)
        else:
            _print_table(bench, list(run_cp_bench(bench)))
    except RemoteError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def parse_list(option: str, text: str, parse: Callable[[str], T], allowed: str) -> tuple[T, ...]:
    """The values in a text with commas; raises UserError with the one that is wrong."""
    return tuple(parse_one(option, item, parse, f"{allowed}, several by commas") for item in text.split(","))


def parse_one(option: str, text: str, parse: Callable[[str], T], allowed: str) -> T:
    """The value of a text; raises UserError in words."""
    try:
        return parse(text.strip())
    except ValueError as error:
        raise UserError(f"{option}: got {text!r}; allowed: {allowed}") from error


def _print_table(bench: "CpBench", results: "list[CpResult]") -> None:
    from rich.console import Console
    from rich.table import Table

    size = bench.model
    table = Table(
        title=f"{size.num_layers} layers x {size.hidden_size}, {size.num_heads}/{size.num_kv_heads} heads of "
        f"{size.head_dim}, {size.dtype}; median of {bench.num_rounds} rounds",
        title_justify="left",
    )
    for column in ("prompt", "cp", *_NAMES, *_FIGURES):
        table.add_column(column, justify="left" if column in _NAMES else "right", overflow="fold")
    for result in results:
        table.add_row(*_cells(result))
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table)


def _cells(result: "CpResult") -> list[str]:
    estimate_s = result.estimate_s
    return [
        f"{result.prefix_len}+{result.prompt_len}" if result.prefix_len else f"{result.prompt_len}",
        f"{result.cp}",
        " ".join(filter(None, (result.mode, result.passing))),
        result.strategy,
        " ".join(filter(None, (result.chosen, result.chosen_passing))),
        f"{result.prefill_s * 1e3:.1f}",
        "" if estimate_s is None else f"{estimate_s * 1e3:.1f}",
        f"{result.efficiency:.3f}",
        f"{result.attention_efficiency:.3f}",
        f"{result.exposed_comm_share:.1%}",
        f"{result.kv_bytes_per_rank / 2**20:.1f}",
    ]
