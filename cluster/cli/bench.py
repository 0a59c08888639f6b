"""Helpers of the `baton bench` commands: errors, comma-separated options, tables, and measuring processes."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from cluster.spec.errors import UserError

T = TypeVar("T")

_WIDTH = 118
"""Width of a table that goes to a file or a pipe."""

bench = typer.Typer(help="Benchmark a running cluster, context parallelism, the engine or the kernels.")


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with a line on stderr."""
    print(f"baton bench: {message}", file=sys.stderr)
    raise typer.Exit(code)


def parse_list(option: str, text: str, parse: Callable[[str], T], allowed: str) -> tuple[T, ...]:
    """Return the values of a comma-separated option; raise UserError with the one that is wrong."""
    return tuple(parse_one(option, item, parse, f"{allowed}, separated by commas") for item in text.split(","))


def parse_one(option: str, text: str, parse: Callable[[str], T], allowed: str) -> T:
    """Return the value of an option; raise UserError if it is wrong."""
    try:
        return parse(text.strip())
    except ValueError as error:
        raise UserError(f"{option}: got {text!r}; allowed: {allowed}") from error


def print_json(value: Any) -> None:
    """Print a dataclass as one JSON object on a line."""
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
    """Return a time as the cell of a table, empty for None."""
    return "" if seconds is None else f"{seconds * 1e3:.{digits}f}"


@contextmanager
def bench_worker(name: str, timeout_s: float) -> Iterator[Callable[..., Any]]:
    """Start the worker ``name`` and yield a function that calls one of its methods by name."""
    from workers.process import WorkerProcess

    process = WorkerProcess(name)

    def ask(method: str, *args: Any) -> Any:
        process.call(method, *args)
        return process.result(timeout_s)

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
