"""`baton bench cp`, `engine` and `kernels`: options and output; the measuring is in cluster/bench and workers/bench."""

from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench import (
    Json,
    Model,
    PromptLens,
    Rounds,
    bench_worker,
    check_models,
    failures_end_the_command,
    milliseconds,
    parse_list,
    print_json,
    print_results,
)
from cluster.spec.config import Device
from cluster.spec.errors import UserError
from cluster.spec.strategy import CpMode, PassingSetting, StrategySetting
from workers.bench.shapes import SHAPES

if TYPE_CHECKING:
    from cluster.bench.cp import CpResult
    from workers.bench.results import DeviceLimits, EngineResult, KernelResult

_NAMES = ("prompt", "cp", "mode", "strategy", "ran as")
_FIGURES = ("prefill\nms", "estimate\nms", "effi-\nciency", "exposed", "KV MiB\na rank")
_MAX_LEN = 1 << 18
_ENGINE_FIGURES = ("TTFT ms", "x floor", "TPOT ms", "x floor", "transformers\nTTFT ms", "TPOT ms")
_KERNEL_FIGURES = ("work", "us", "rate", "of limit", "torch us", "flash_attn us")


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


def engine(
    model: Model = "Llama-3-8B",
    prompt_len: PromptLens = "8192,32768,131072",
    output_len: Annotated[int, typer.Option(help="Output tokens; the first is reported as TTFT.", min=2)] = 64,
    chunk_tokens: Annotated[int, typer.Option(help="Maximum prompt tokens per step.", min=1)] = 8192,
    rounds: Rounds = 3,
    device: Annotated[Device, typer.Option(help="cuda (bf16) or cpu (fp32).")] = Device.CUDA,
    as_json: Json = False,
) -> None:
    """Benchmark one request on one device, against the device's limits and the transformers library."""
    check_models("--model", [model])
    lens = parse_list("--prompt-len", prompt_len, int)
    if wrong := [length for length in lens if not 1 <= length <= _MAX_LEN - output_len]:
        raise UserError(f"--prompt-len: got {wrong[0]}; allowed: 1 to {_MAX_LEN - output_len}")
    with bench_worker("workers.bench.engine:EngineBench") as ask:
        ask("make", model, device, max(lens) + output_len, chunk_tokens)
        limits = ask("limits")
        if as_json:
            print_json(limits)
        results = (ask("measure", length, output_len, rounds) for length in lens)
        title = f"{model} on {_describe(limits)}; medians of {rounds} rounds"
        print_results(results, _engine_cells, title=title, names=("prompt",), figures=_ENGINE_FIGURES, as_json=as_json)


def _engine_cells(result: "EngineResult") -> list[str]:
    peer = [milliseconds(result.transformers_ttft_s), milliseconds(result.transformers_tpot_s, 2)]
    return [
        f"{result.prompt_len}",
        milliseconds(result.ttft_s),
        f"{result.ttft_ratio:.2f}",
        milliseconds(result.tpot_s, 2),
        f"{result.tpot_ratio:.2f}",
        *([result.transformers_problem, ""] if result.transformers_problem else peer),
    ]


def kernels(
    models: Annotated[
        str, typer.Option(help=f"Model shapes, comma-separated: {', '.join(SHAPES)}.")
    ] = "Llama-3-8B,Qwen3-0.6B",
    as_json: Json = False,
) -> None:
    """Benchmark the kernels on this machine's first GPU, against its measured bandwidth and bf16 matmul rate."""
    names = models.split(",")
    check_models("--models", names)
    with bench_worker("workers.bench.kernels:KernelBench") as ask:
        ask("make")
        limits = ask("limits")
        if as_json:
            print_json(limits)
        for name in names:
            title = f"{name} on {_describe(limits)}"
            print_results(
                ask("measure", name),
                _kernel_cells,
                title=title,
                names=("kernel",),
                figures=_KERNEL_FIGURES,
                as_json=as_json,
            )


def _kernel_cells(result: "KernelResult") -> list[str]:
    is_flops = result.limit == "flops"
    peers = (result.torch_seconds, result.flash_attn_seconds)
    return [
        result.kernel,
        f"{result.work / 1e12:.2f} TFLOP" if is_flops else f"{result.work / 1e9:.3f} GB",
        f"{result.seconds * 1e6:.1f}",
        f"{result.work / result.seconds / 1e12:.2f} {'TFLOP/s' if is_flops else 'TB/s'}",
        f"{result.share_of_limit:.1%}",
        *("" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in peers),
    ]


def _describe(limits: "DeviceLimits") -> str:
    return f"{limits.device} ({limits.flops_per_s / 1e12:.3g} TFLOP/s, {limits.bytes_per_s / 1e12:.3g} TB/s copied)"
