"""Helpers of the `baton bench` commands: options, errors, tables, and measuring processes."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from cluster.spec.errors import UserError
from workers.bench.shapes import SHAPES

T = TypeVar("T")

_WIDTH = 118
"""Width of a table that goes to a file or a pipe."""
_ANSWER_S = 7200.0

PromptLens = Annotated[str, typer.Option("--prompt-len", help="Prompt lengths in tokens, comma-separated.")]
Rounds = Annotated[int, typer.Option(help="Measurements of each; medians are reported.", min=1)]
Model = Annotated[str, typer.Option(help=f"Model shape, with random weights: {', '.join(SHAPES)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]

bench = typer.Typer(help="Benchmark a running cluster, context parallelism, the engine or the kernels.")


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"baton bench: {message}", file=sys.stderr)
    raise typer.Exit(code)


def parse_list(option: str, text: str, parse: Callable[[str], T], allowed: Iterable[str] = ("integers",)) -> list[T]:
    """Return the values of a comma-separated option; raise UserError with the one that is wrong."""
    values = []
    for item in text.split(","):
        try:
            values.append(parse(item.strip()))
        except ValueError as error:
            raise UserError(f"{option}: got {item!r}; allowed: {', '.join(allowed)}, separated by commas") from error
    return values


def check_models(option: str, names: Iterable[str]) -> None:
    if unknown := [name for name in names if name not in SHAPES]:
        raise UserError(f"{option}: got {unknown[0]!r}; allowed: {', '.join(SHAPES)}")


def print_results(
    results: Iterable[Any],
    cells: Callable[[Any], Sequence[str]],
    *,
    title: str,
    names: Sequence[str],
    figures: Sequence[str],
    as_json: bool,
) -> None:
    """Print dataclasses as JSON, one per line as they arrive, or as the rows of a table."""
    if as_json:
        for result in results:
            print_json(result)
    else:
        print_table(title, names, figures, map(cells, results))


def print_json(value: Any) -> None:
    print(json.dumps(dataclasses.asdict(value)), flush=True)


def print_table(title: str, names: Sequence[str], figures: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with left-aligned columns of names and right-aligned columns of figures."""
    table = Table(title=title, title_justify="left")
    for column in names:
        table.add_column(column, overflow="fold")
    for column in figures:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table)


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.{digits}f}"


@contextmanager
def bench_worker(name: str) -> Iterator[Callable[..., Any]]:
    """Start the worker ``name`` and yield a function that calls one of its methods by name."""
    from workers.process import WorkerProcess

    process = WorkerProcess(name)

    def ask(method: str, *args: Any) -> Any:
        process.call(method, *args)
        return process.result(_ANSWER_S)

    try:
        with failures_end_the_command():
            yield ask
    finally:
        process.close()


@contextmanager
def failures_end_the_command() -> Iterator[None]:
    """Turn the error of a measuring process, and Ctrl-C, into the end of the command."""
    from workers.process import RemoteError

    try:
        yield
    except RemoteError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", 130)
