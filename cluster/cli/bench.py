"""Options and output of `baton bench cp`, `engine` and `kernels`, which cluster/bench and workers/bench implement."""

import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from cluster.spec.config import Device
from cluster.spec.errors import UserError
from cluster.spec.ranks import MOST_RANKS
from cluster.spec.strategy import Collectives, CpMode, ShardLinear, StrategySetting
from workers.bench.shapes import LATENT_SHAPES, SHAPES, VARIANTS

T = TypeVar("T")

_WIDTH = 118
_TIMEOUT_S = 7200.0
_MAX_LEN = 1 << 18

PromptLens = Annotated[str, typer.Option("--prompt-len", help="Prompt lengths in tokens, separated by commas.")]
Rounds = Annotated[int, typer.Option(help="Number of measurements. The command reports medians.", min=1)]
CpModel = Annotated[str, typer.Option(help=f"Model shape, with random weights: {', '.join([*SHAPES, *VARIANTS])}.")]
Model = Annotated[str, typer.Option(help=f"Model shape, with random weights: {', '.join(SHAPES)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of a table.")]


def cp(
    prompt_len: PromptLens = "2048,8192",
    cp: Annotated[int, typer.Option(help="Number of CP ranks.", min=1, max=MOST_RANKS)] = 2,
    strategy: Annotated[
        str, typer.Option(help="Strategies to compare, separated by commas.")
    ] = "none,contiguous,zigzag,auto",
    mode: Annotated[
        CpMode,
        typer.Option(help="CP mode: with gather, every rank holds all KV; with ring, each holds the pages it owns."),
    ] = CpMode.GATHER,
    shard_linear: Annotated[
        ShardLinear, typer.Option(help="Sharding of query and output projections over CP ranks, as in a deploy file.")
    ] = ShardLinear.NONE,
    collectives: Annotated[
        Collectives, typer.Option(help="Transport between ranks: shared memory, or TCP, which overlaps with work.")
    ] = Collectives.AUTO,
    prefix_len: Annotated[int, typer.Option(help="Number of cached tokens before each prompt.", min=0)] = 0,
    rounds: Rounds = 5,
    model: CpModel = "small",
    as_json: Json = False,
) -> None:
    """Benchmark one prefill step on CP ranks, and compare it with a single rank.

    Runs on this machine's CPUs with one thread per rank. No cluster is needed.
    """
    # Each command imports what it needs, so that the command line starts quickly.
    from cluster.bench.cp import CpBench, run_cp_bench

    _check_models("--model", [model], [*SHAPES, *VARIANTS])
    bench = CpBench(
        prompt_lens=_parse_lens(prompt_len),
        prefix_len=prefix_len,
        cp=cp,
        mode=mode,
        strategies=_parse_list("--strategy", strategy, StrategySetting, StrategySetting),
        num_rounds=rounds,
        model=model,
        shard_linear=shard_linear,
        collectives=collectives,
    )
    with _errors_end_the_command():
        title = f"{model}, {mode} mode, {prefix_len} cached tokens; medians of {rounds} rounds"
        print_results(title, run_cp_bench(bench), as_json=as_json)


def engine(
    model: Model = "Llama-3-8B",
    prompt_len: PromptLens = "8192,32768,131072",
    output_len: Annotated[int, typer.Option(help="Number of output tokens.", min=2)] = 64,
    batch_size: Annotated[int, typer.Option(help="Number of requests that decode together.", min=1)] = 1,
    rounds: Rounds = 3,
    device: Annotated[Device, typer.Option(help="Device: cuda or cpu.")] = Device.CUDA,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Number format. With auto, it is bfloat16 on a GPU and float32 on a CPU."),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Benchmark requests on one device, and compare them with the device's limits and the transformers library."""
    _check_models("--model", [model])
    lens = _parse_lens(prompt_len, _MAX_LEN - output_len)
    with _bench_worker("workers.bench.engine:EngineBench") as ask:
        ask("make", model, device, max(lens) + output_len, dtype, batch_size)
        print_results("device", [ask("limits")], as_json=as_json)
        results = (ask("measure", length, output_len, rounds) for length in lens)
        print_results(f"medians of {rounds} rounds", results, as_json=as_json)


def kernels(
    models: Annotated[
        str, typer.Option(help=f"Model shapes, separated by commas: {', '.join([*SHAPES, *LATENT_SHAPES])}.")
    ] = "Llama-3-8B,Qwen3-0.6B,DeepSeek-V3.2",
    as_json: Json = False,
) -> None:
    """Benchmark kernels on this machine's first GPU, and compare them with its measured bandwidth and matmul rate."""
    names = models.split(",")
    _check_models("--models", names, [*SHAPES, *LATENT_SHAPES])
    with _bench_worker("workers.bench.kernels:KernelBench") as ask:
        ask("make")
        print_results("device", [ask("limits")], as_json=as_json)
        for name in names:
            print_results(name, ask("measure", name), as_json=as_json)


def _check_models(option: str, names: Iterable[str], allowed: Collection[str] = SHAPES) -> None:
    if unknown := [name for name in names if name not in allowed]:
        raise UserError(f"{option}: got {unknown[0]!r}; allowed: {', '.join(allowed)}")


def _parse_lens(text: str, most: int | None = None) -> list[int]:
    lens = _parse_list("--prompt-len", text, int, ("integers",))
    if wrong := [length for length in lens if length < 1 or (most is not None and length > most)]:
        raise UserError(f"--prompt-len: got {wrong[0]}; allowed: {f'1 to {most}' if most else '1 or more'}")
    return lens


def _parse_list(option: str, text: str, parse: Callable[[str], T], allowed: Iterable[str]) -> list[T]:
    values = []
    for item in text.split(","):
        try:
            values.append(parse(item.strip()))
        except ValueError as error:
            raise UserError(f"{option}: got {item!r}; allowed: {', '.join(allowed)}, separated by commas") from error
    return values


def print_results(title: str, results: Iterable[Any], *, as_json: bool) -> None:
    """Print dataclasses as they arrive, one JSON object per line, or as a table with one column per field."""
    rows = map(dataclasses.asdict, results)
    if not as_json:
        print_table(title, rows)
        return
    for row in rows:
        print(json.dumps(row), flush=True)


def print_table(title: str, rows: Iterable[Mapping[str, object]]) -> None:
    table = Table(title=title, title_justify="left")
    for row in rows:
        if not table.columns:
            for name, value in row.items():
                justify: Literal["left", "right"] = "left" if isinstance(value, str) else "right"
                table.add_column(name.replace("_", " "), justify=justify, overflow="fold")
        table.add_row(*map(_cell, row.values()))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if 100 <= value < 1e7 else f"{value:.3g}"
    return "" if value is None else str(value)


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"baton bench: {message}", file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def _bench_worker(name: str) -> Iterator[Callable[..., Any]]:
    """Start a worker process and yield a function that calls its methods by name."""
    from workers.bench.process import WorkerProcess

    process = WorkerProcess(name)

    def ask(method: str, *args: Any) -> Any:
        process.call(method, *args)
        return process.result(_TIMEOUT_S)

    try:
        with _errors_end_the_command():
            yield ask
    finally:
        process.close()


@contextmanager
def _errors_end_the_command() -> Iterator[None]:
    from workers.bench.process import RemoteError

    try:
        yield
    except RemoteError as error:
        fail(error.user_message or str(error))
    except KeyboardInterrupt:
        fail("interrupted", 130)
