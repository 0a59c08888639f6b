"""`baton bench cp`: options and output; the measuring is in cluster/bench/cp.py."""

from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench import (
    Json,
    Model,
    PromptLens,
    Rounds,
    check_models,
    failures_end_the_command,
    milliseconds,
    parse_list,
    print_results,
)
from cluster.spec.strategy import CpMode, PassingSetting, StrategySetting

if TYPE_CHECKING:
    from cluster.bench.cp import CpResult

_NAMES = ("prompt", "cp", "mode", "strategy", "ran as")
_FIGURES = ("prefill\nms", "estimate\nms", "effi-\nciency", "exposed", "KV MiB\na rank")


def cp(
    prompt_len: PromptLens = "2048,8192",
    cp: Annotated[str, typer.Option(help="CP sizes, comma-separated; cp=1 always runs as the baseline.")] = "1,2",
    strategy: Annotated[str, typer.Option(help="Strategies or auto, comma-separated.")] = "none,contiguous,zigzag,auto",
    mode: Annotated[str, typer.Option(help="gather or ring, comma-separated.")] = "gather",
    passing: Annotated[str, typer.Option(help="In ring mode: auto, pass_kv or pass_q, comma-separated.")] = "auto",
    prefix_len: Annotated[str, typer.Option(help="Cached tokens before the prompt, comma-separated.")] = "0",
    rounds: Rounds = 5,
    model: Model = "small",
    dtype: Annotated[str, typer.Option(help="Data type of weights and KV: bfloat16 or float32.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Benchmark one prefill step over CP ranks on this machine's CPUs, one thread per rank, without a cluster."""
    # Imported here to keep the command line's start-up short.
    from cluster.bench.cp import CpBench, run_cp_bench

    check_models("--model", [model])
    bench = CpBench(
        prompt_lens=parse_list("--prompt-len", prompt_len, int),
        cps=parse_list("--cp", cp, int),
        strategies=parse_list("--strategy", strategy, StrategySetting, StrategySetting),
        modes=parse_list("--mode", mode, CpMode, CpMode),
        passings=parse_list("--passing", passing, PassingSetting, PassingSetting),
        prefix_lens=parse_list("--prefix-len", prefix_len, int),
        num_rounds=rounds,
        model=model,
        dtype=dtype,
    )
    title = f"{model}, {dtype}; medians of {rounds} rounds"
    with failures_end_the_command():
        print_results(run_cp_bench(bench), _cells, title=title, names=_NAMES, figures=_FIGURES, as_json=as_json)


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
