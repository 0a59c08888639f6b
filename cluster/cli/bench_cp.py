"""`baton bench cp`: options and output; the measuring is in cluster/bench/cp.py."""

from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench import failures_end_the_command, milliseconds, parse_list, parse_one, print_json, print_table
from cluster.spec.strategy import Collectives, CpMode, PassingSetting, StrategySetting
from workers.bench.shapes import SHAPES

if TYPE_CHECKING:
    from cluster.bench.cp import CpResult

DEFAULT_STRATEGIES = "none,contiguous,zigzag,auto"
_NAMES = ("prompt", "cp", "mode", "strategy", "ran as")
_FIGURES = ("prefill\nms", "estimate\nms", "effi-\nciency", "exposed", "KV MiB\na rank")
_COUNTS = "integers"


def cp(
    prompt_len: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "2048,8192",
    cp: Annotated[str, typer.Option(help="CP sizes, comma-separated; cp=1 always runs as the baseline.")] = "1,2",
    strategy: Annotated[str, typer.Option(help="Strategies or auto, comma-separated.")] = DEFAULT_STRATEGIES,
    mode: Annotated[str, typer.Option(help="gather or ring, comma-separated.")] = "gather",
    passing: Annotated[str, typer.Option(help="In ring mode: auto, pass_kv or pass_q, comma-separated.")] = "auto",
    prefix_len: Annotated[str, typer.Option(help="Cached tokens before the prompt, comma-separated.")] = "0",
    collectives: Annotated[str, typer.Option(help="auto for shared memory, or tcp as between hosts.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Measurements of each; medians are reported.", min=1)] = 5,
    model: Annotated[str, typer.Option(help=f"Model shape, with random weights: {', '.join(SHAPES)}.")] = "small",
    dtype: Annotated[str, typer.Option(help="Data type of weights and KV: bfloat16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Benchmark one prefill step over CP ranks on this machine's CPUs, one thread per rank, without a cluster."""
    # Imported here to keep the command line's start-up short.
    from cluster.bench.cp import CpBench, run_cp_bench

    bench = CpBench(
        prompt_lens=parse_list("--prompt-len", prompt_len, int, _COUNTS),
        cps=parse_list("--cp", cp, int, _COUNTS),
        strategies=parse_list("--strategy", strategy, StrategySetting, ", ".join(StrategySetting)),
        modes=parse_list("--mode", mode, CpMode, ", ".join(CpMode)),
        passings=parse_list("--passing", passing, PassingSetting, ", ".join(PassingSetting)),
        prefix_lens=parse_list("--prefix-len", prefix_len, int, _COUNTS),
        collectives=parse_one("--collectives", collectives, Collectives, ", ".join(Collectives)),
        num_rounds=rounds,
        model=model,
        dtype=dtype,
    )
    with failures_end_the_command():
        if as_json:
            for result in run_cp_bench(bench):
                print_json(result)
        else:
            title = f"{model}, {dtype}; medians of {rounds} rounds"
            print_table(title, _NAMES, _FIGURES, [_cells(result) for result in run_cp_bench(bench)])


def _cells(result: "CpResult") -> list[str]:
    return [
        f"{result.prefix_len}+{result.prompt_len}" if result.prefix_len else f"{result.prompt_len}",
        f"{result.cp}",
        " ".join(filter(None, (result.mode, result.passing))),
        result.strategy,
        " ".join(filter(None, (result.chosen, result.chosen_passing))),
        milliseconds(result.prefill_s),
        milliseconds(result.estimate_s),
        f"{result.efficiency:.3f}",
        f"{result.exposed_comm_share:.1%}",
        f"{result.kv_bytes_per_rank / 2**20:.1f}",
    ]
