"""`baton bench engine`: options and output; the measuring is in workers/bench_engine.py."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench_cp import parse_list, parse_one
from cluster.cli.bench_worker import bench_worker
from cluster.spec.config import Device
from cluster.spec.errors import UserError
from workers.engine_result import ENGINE_SHAPES

if TYPE_CHECKING:
    from workers.engine_result import EngineResult
    from workers.kernel_result import ChipLimits

_BENCH = "workers.bench_engine:EngineBench"
_TIMEOUT_S = 7200.0


def engine(
    model: Annotated[str, typer.Option(help=f"Shape, with random weights: {', '.join(ENGINE_SHAPES)}.")] = "Llama-3-8B",
    prompt_len: Annotated[str, typer.Option(help="Tokens of the prompt, several by commas.")] = "8192,32768,131072",
    output_len: Annotated[int, typer.Option(help="Tokens of the answer, of which the first counts for itself.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(help="Most tokens of the prompt in one step.", min=1)] = 8192,
    rounds: Annotated[int, typer.Option(help="Measurements of each; medians are reported.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cuda, in bf16, or cpu, in fp32.")] = "cuda",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, the device's limits first.")
    ] = False,
) -> None:
    """Time the first token and those after it of one request, beside what the device allows and transformers takes."""
    if model not in ENGINE_SHAPES:
        raise UserError(f"--model: got {model!r}; allowed: {', '.join(ENGINE_SHAPES)}")
    lens = parse_list("--prompt-len", prompt_len, int, "whole numbers")
    _check_lens(model, lens, output_len)
    on = parse_one("--device", device, Device, ", ".join(Device))
    with bench_worker(_BENCH, _TIMEOUT_S) as ask:
        ask("make", model, on, max(lens) + output_len, chunk_tokens)
        _print_limits(ask("limits"), as_json)
        for length in lens:
            _print_result(ask("measure", length, output_len, rounds), as_json)


def _check_lens(model: str, prompt_lens: tuple[int, ...], output_len: int) -> None:
    if output_len < 2:
        raise UserError(f"--output-len: got {output_len}; allowed: 2 or more, as the first token counts for itself")
    most = ENGINE_SHAPES[model]["max_position_embeddings"] - output_len
    if wrong := [length for length in prompt_lens if not 1 <= length <= most]:
        raise UserError(f"--prompt-len: got {wrong[0]}; allowed: 1 to {most}")


def _print_limits(limits: "ChipLimits", as_json: bool) -> None:
    if as_json:
        _print_line(limits)
        return
    typer.echo(f"{limits.device}: {limits.flops_per_s / 1e12:.3g} TFLOP/s, {limits.bytes_per_s / 1e12:.3g} TB/s copied")
    typer.echo(
        f"{'model':12} {'prompt':>7} {'TTFT ms':>10} {'of floor':>9} {'TPOT ms':>9} {'of floor':>9} {'host ms':>8} "
        f"{'transformers: TTFT':>19} {'TPOT':>9}"
    )


def _print_result(result: "EngineResult", as_json: bool) -> None:
    if as_json:
        _print_line(result)
        return
    peer = f" {result.transformers_problem}"
    if result.transformers_ttft_s is not None and result.transformers_tpot_s is not None:
        peer = f"{result.transformers_ttft_s * 1e3:19.1f} {result.transformers_tpot_s * 1e3:9.2f}"
    host = "" if result.host_s is None else f"{result.host_s * 1e3:.3f}"
    typer.echo(
        f"{result.model:12} {result.prompt_len:7} {result.ttft_s * 1e3:10.1f} {result.ttft_ratio:8.2f}x "
        f"{result.tpot_s * 1e3:9.2f} {result.tpot_ratio:8.2f}x {host:>8} {peer}"
    )


def _print_line(found: "ChipLimits | EngineResult") -> None:
    typer.echo(json.dumps(dataclasses.asdict(found)))
