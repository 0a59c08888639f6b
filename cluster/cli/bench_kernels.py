"""`baton bench kernels`: options and output; the measuring is in workers/bench_kernels.py."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench_worker import bench_worker
from cluster.spec.errors import UserError
from workers.kernel_result import SHAPES

if TYPE_CHECKING:
    from workers.kernel_result import ChipLimits, KernelResult

_BENCH = "workers.bench_kernels:KernelBench"
_TIMEOUT_S = 600.0


def kernels(
    models: Annotated[str, typer.Option(help=f"Shapes, several by commas: {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, the chip's limits first.")
    ] = False,
) -> None:
    """Time the kernels of this machine's first GPU, as shares of its measured copy bandwidth and bf16 matmul rate."""
    names = models.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        raise UserError(f"--models: got {unknown[0]!r}; allowed: {', '.join(SHAPES)}, several by commas")
    with bench_worker(_BENCH, _TIMEOUT_S) as ask:
        ask("make")
        _print_limits(ask("limits"), as_json)
        for name in names:
            for result in ask("measure", name):
                _print_result(result, as_json)


def _print_limits(limits: "ChipLimits", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(limits)))
        return
    typer.echo(
        f"{limits.device}: {limits.flops_per_s / 1e12:.0f} TFLOP/s in bf16, {limits.bytes_per_s / 1e12:.2f} TB/s copied"
    )
    typer.echo(
        f"{'model':16} {'kernel':26} {'us':>10} {'rate':>15} {'of limit':>9} {'torch us':>10} {'flash_attn us':>13}"
    )


def _print_result(result: "KernelResult", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    unit = "TFLOP/s" if result.limit == "flops" else "TB/s"
    peers = (result.torch_seconds, result.flash_attn_seconds)
    torch_us, flash = ("" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in peers)
    typer.echo(
        f"{result.model:16} {result.kernel:26} {result.seconds * 1e6:10.1f} "
        f"{result.work / result.seconds / 1e12:7.2f} {unit:7} {result.share_of_limit:9.1%} {torch_us:>10} {flash:>13}"
    )
