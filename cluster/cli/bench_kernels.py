"""`baton bench kernels`: options and output; the measuring is in workers/bench_kernels.py."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.bench_worker import bench_worker
from cluster.spec.errors import UserError
from workers.kernel_result import H200, SHAPES

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
    """Time the kernels of this machine's first GPU, as shares of its measured copy bandwidth and bf16 matmul rate.

    Layers of pages on their way to the host or from there are held against a copy in that direction. On an H200 others
    are also shares of 790 TFLOP/s and 4.3 TB/s. "joining" is what of its time a launch of attention takes to join the
    parts that its programs leave: by so much it is shorter when nobody does.
    """
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
    flops, copied = f"{limits.flops_per_s / 1e12:.0f} TFLOP/s in bf16", f"{limits.bytes_per_s / 1e12:.2f} TB/s copied"
    if limits.is_h200:
        flops += f" ({limits.flops_per_s / H200.flops_per_s:.1%} of {H200.flops_per_s / 1e12:.0f})"
        copied += f" ({limits.bytes_per_s / H200.bytes_per_s:.1%} of {H200.bytes_per_s / 1e12:.1f})"
    rates = {"to": limits.to_host_bytes_per_s, "from": limits.from_host_bytes_per_s}
    link = [f", {rate / 1e12:.3f} TB/s {way} the host" for way, rate in rates.items() if rate is not None]
    typer.echo(f"{limits.device}: {flops}, {copied}{''.join(link)}")
    typer.echo(
        f"{'model':16} {'kernel':30} {'work':>11} {'us':>10} {'rate':>15} {'of limit':>9} {'of H200':>8} "
        f"{'joining':>8} {'torch us':>10} {'flash_attn us':>13}"
    )


def _print_result(result: "KernelResult", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    is_flops = result.limit == "flops"
    unit = "TFLOP/s" if is_flops else "TB/s"
    work = f"{result.work / 1e12:.2f} TFLOP" if is_flops else f"{result.work / 1e9:.3f} GB"
    shares = (result.share_of_limit, result.share_of_h200, result.share_of_joining)
    of_limit, of_h200, joining = ("" if share is None else f"{share:.1%}" for share in shares)
    peers = (result.torch_seconds, result.flash_attn_seconds)
    torch_us, flash = ("" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in peers)
    typer.echo(
        f"{result.model:16} {result.kernel:30} {work:>11} {result.seconds * 1e6:10.1f} "
        f"{result.work / result.seconds / 1e12:7.2f} {unit:7} {of_limit:>9} {of_h200:>8} {joining:>8} "
        f"{torch_us:>10} {flash:>13}".rstrip()
    )
