"""`baton bench engine` and `baton bench kernels`: options and output; the measuring is in workers/bench."""

from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench import bench_worker, milliseconds, parse_list, parse_one, print_json, print_table
from cluster.spec.config import Device
from cluster.spec.errors import UserError
from workers.bench.shapes import SHAPES

if TYPE_CHECKING:
    from workers.bench.results import DeviceLimits, EngineResult, KernelResult

_MAX_LEN = 1 << 18
_ANSWER_S = 7200.0
_ENGINE_FIGURES = ("TTFT ms", "x floor", "TPOT ms", "x floor", "host ms", "transformers\nTTFT ms", "TPOT ms")
_KERNEL_FIGURES = ("work", "us", "rate", "of limit", "torch us", "flash_attn us")


def engine(
    model: Annotated[str, typer.Option(help=f"Model shape, with random weights: {', '.join(SHAPES)}.")] = "Llama-3-8B",
    prompt_len: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "8192,32768,131072",
    output_len: Annotated[int, typer.Option(help="Output tokens; the first is reported as TTFT.", min=2)] = 64,
    chunk_tokens: Annotated[int, typer.Option(help="Maximum prompt tokens per step.", min=1)] = 8192,
    rounds: Annotated[int, typer.Option(help="Measurements of each; medians are reported.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cuda (bf16) or cpu (fp32).")] = "cuda",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line, the device's limits first.")
    ] = False,
) -> None:
    """Benchmark one request on one device, against the device's limits and the transformers library."""
    _check_models("model", model)
    lens = parse_list("--prompt-len", prompt_len, int, "integers")
    if wrong := [length for length in lens if not 1 <= length <= _MAX_LEN - output_len]:
        raise UserError(f"--prompt-len: got {wrong[0]}; allowed: 1 to {_MAX_LEN - output_len}")
    on = parse_one("--device", device, Device, ", ".join(Device))
    with bench_worker("workers.bench.engine:EngineBench", _ANSWER_S) as ask:
        ask("make", model, on, max(lens) + output_len, chunk_tokens)
        limits = ask("limits")
        results = (ask("measure", length, output_len, rounds) for length in lens)
        if as_json:
            print_json(limits)
            for result in results:
                print_json(result)
        else:
            title = f"{model} on {_describe(limits)}; medians of {rounds} rounds"
            print_table(title, ("prompt",), _ENGINE_FIGURES, [_engine_cells(result) for result in results])


def _engine_cells(result: "EngineResult") -> list[str]:
    peer = [milliseconds(result.transformers_ttft_s), milliseconds(result.transformers_tpot_s, 2)]
    return [
        f"{result.prompt_len}",
        milliseconds(result.ttft_s),
        f"{result.ttft_ratio:.2f}",
        milliseconds(result.tpot_s, 2),
        f"{result.tpot_ratio:.2f}",
        milliseconds(result.host_s, 3),
        *([result.transformers_problem, ""] if result.transformers_problem else peer),
    ]


def kernels(
    models: Annotated[
        str, typer.Option(help=f"Model shapes, comma-separated: {', '.join(SHAPES)}.")
    ] = "Llama-3-8B,Qwen3-0.6B",
    tp: Annotated[int, typer.Option(help="Run the shapes of one of this many TP ranks.", min=1)] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line, the device's limits first.")
    ] = False,
) -> None:
    """Benchmark the kernels on this machine's first GPU, against its measured bandwidth and bf16 matmul rate."""
    names = models.split(",")
    _check_models("models", *names)
    if wrong := [name for name in names if SHAPES[name].heads % tp or SHAPES[name].inner % tp]:
        raise UserError(f"--tp: got {tp}; allowed: a divisor of the {SHAPES[wrong[0]].heads} heads of {wrong[0]}")
    with bench_worker("workers.bench.kernels:KernelBench", _ANSWER_S) as ask:
        ask("make")
        limits = ask("limits")
        if as_json:
            print_json(limits)
        for name in names:
            results: list[KernelResult] = ask("measure", name, tp)
            if as_json:
                for result in results:
                    print_json(result)
            else:
                title = f"{results[0].model} on {_describe(limits)}"
                print_table(title, ("kernel",), _KERNEL_FIGURES, map(_kernel_cells, results))


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


def _check_models(option: str, *names: str) -> None:
    if unknown := [name for name in names if name not in SHAPES]:
        raise UserError(f"--{option}: got {unknown[0]!r}; allowed: {', '.join(SHAPES)}")


def _describe(limits: "DeviceLimits") -> str:
    link = {"to": limits.to_host_bytes_per_s, "from": limits.from_host_bytes_per_s}
    over_link = [f", {rate / 1e12:.3f} TB/s {way} host" for way, rate in link.items() if rate is not None]
    rates = f"{limits.flops_per_s / 1e12:.3g} TFLOP/s, {limits.bytes_per_s / 1e12:.3g} TB/s copied"
    return f"{limits.device} ({rates}{''.join(over_link)})"
