"""`baton bench layouts`: options and output; the measuring is in cluster/bench/layouts.py."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.bench.layouts import LayoutBytes


def layouts(
    prompt_len: Annotated[int, typer.Option(help="Tokens of the prompt.", min=16)] = 1536,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Count the bytes that ranks move for one request, in plain processes of this machine, beside their formulas."""
    from cluster.bench.layouts import run_layouts

    if not as_json:
        typer.echo(
            f"{'layout':24} {'side':8} {'traffic':12} {'a layer KiB':>12} {'formula KiB':>12} {'difference':>11}"
        )
    for result in run_layouts(prompt_len):
        typer.echo(_json(result) if as_json else _line(result))


def _json(result: "LayoutBytes") -> str:
    return json.dumps(
        {**dataclasses.asdict(result), "difference": result.difference if result.expected_bytes else None}
    )


def _line(result: "LayoutBytes") -> str:
    measured, expected = (
        (num_bytes - result.beside_bytes) / result.layers / 1024
        for num_bytes in (result.measured_bytes, result.expected_bytes)
    )
    names = f"{result.layout:24} {result.side:8} {result.traffic:12}"
    return f"{names} {measured:12.1f} {expected:12.1f} {result.difference:+11.2%}"
