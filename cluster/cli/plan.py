"""`baton plan` and `baton schema`: what a deploy file would start, and which keys it can have."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.ids import Role
from cluster.spec.loader import DEFAULT_FILE, load_config

if TYPE_CHECKING:
    from cluster.planner.memory import KvPlan
    from cluster.planner.plan import CheckResult, Plan, PortPlan, ReplicaPlan, StepsPlan
    from cluster.planner.projections import ProjectionsPlan
    from cluster.planner.traffic import TrafficPlan

File = Annotated[Path, typer.Argument(help="Deploy file, or the name of a built-in one.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the file. Repeatable.")
]
_AXES = ("dp", "cp", "tp", "pp")
_MOE_AXES = ("moe_dp", "ep", "moe_tp")
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def plan(
    file: File = DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List the checks that pass, too.")] = False,
    model: Annotated[str | None, typer.Option(help="Model to use instead of the file's.")] = None,
    changes: Changes = None,
) -> None:
    """Show the replicas, ranks, groups, KV memory, ports and checks of a deploy file without starting anything.

    The exit code is 1 if a check fails.
    """
    # Each command imports what it needs, so that the command line starts quickly.
    from cluster.planner.model import read_model
    from cluster.planner.plan import make_plan

    config = load_config(file, overrides(changes or [], model))
    made = make_plan(config, read_model(config))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(made), indent=2))
    else:
        _print_plan(made, verbose=verbose)
    if not all(check.passed for check in made.checks):
        raise typer.Exit(1)


def overrides(changes: Sequence[str], model: str | None) -> dict[str, str]:
    """Return the values of ``--set`` and ``--model`` by dotted key.

    Raises:
        UserError: a change is not ``key=value``.
    """
    made = {} if model is None else {"model.path": model}
    for change in changes:
        key, equals, value = change.partition("=")
        if not (key and equals):
            raise UserError(f"--set: got {change!r}; allowed: key=value with a dotted key, like kv.page_size=32")
        made[key.strip()] = value.strip()
    return made


def schema_text() -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **DeployConfig.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def schema() -> None:
    """Print the JSON schema of a deploy file."""
    typer.echo(schema_text(), nl=False)


def _print_plan(plan: "Plan", *, verbose: bool) -> None:
    console = Console(highlight=False)
    console.print(f"Cluster [bold]{plan.name}[/] serves the model [bold]{plan.model}[/]\n")
    for role in Role:
        _print_replicas(console, [replica for replica in plan.replicas if replica.role is role])
    _print_steps(console, plan.steps)
    if plan.not_captured:
        console.print(Text(f"decode steps are not captured: {plan.not_captured}\n", style="bold"))
    _print_projections(console, plan.projections)
    _print_traffic(console, plan.traffic)
    _print_kv(console, plan.kv)
    _print_ports(console, plan.ports)
    if plan.advice:
        console.print(Text(f"advice: {plan.advice}\n"))
    _print_checks(console, plan.checks, verbose=verbose)


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], num_text: int
) -> None:
    # All columns after the first num_text contain numbers.
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_text else "right")
    for row in rows:
        table.add_row(*row)
    console.print(Text(title, style="bold"))
    console.print(table)


def _print_replicas(console: Console, replicas: "list[ReplicaPlan]") -> None:
    first, last = replicas[0], replicas[-1]
    names = first.name if first is last else f"{first.name} to {last.name}, each"
    num_ranks = len(first.ranks)
    title = f"{names}: {num_ranks} worker{'s' if num_ranks > 1 else ''}"
    ranks = sorted(first.ranks, key=lambda rank: [getattr(rank, axis) for axis in _AXES])
    rank_rows = [[str(getattr(rank, column)) for column in (*_AXES, "global_rank", *_MOE_AXES)] for rank in ranks]
    _print_table(console, title, [*_AXES, "global rank", *_MOE_AXES], rank_rows, num_text=0)
    groups = {str(name): lists for name, lists in first.groups.items()}
    if first.head_copies:
        groups["head_copies"] = first.head_copies
    group_rows = [
        (name, " ".join("{" + ",".join(map(str, members)) + "}" for members in lists)) for name, lists in groups.items()
    ]
    _print_table(console, "groups", ["name", "global ranks"], group_rows, num_text=2)


def _print_steps(console: Console, steps: "StepsPlan") -> None:
    ways = f"strategy {steps.strategy}, mode {steps.mode}"
    if steps.passing is not None:
        ways += f", passing {steps.passing}"
    console.print(Text(f"prefill steps: {ways}, at most {steps.chunk_tokens:,} tokens each\n", style="bold"))


def _print_projections(console: Console, projections: "ProjectionsPlan | None") -> None:
    if projections is None:
        return
    title = f"shard_linear {projections.way}: a prefill worker holds {_size(projections.held_bytes)} of query and "
    title += f"output projections with buffers, instead of {_size(projections.whole_bytes)}"
    hidden = max(0.0, 1 - projections.exposed_s / projections.transfer_s)
    traffic = f"  {_size(projections.step_bytes)} sent in every step: {projections.transfer_s:.2g} s at an assumed "
    traffic += f"{projections.bytes_per_s / 1e9:g} GB/s, of which a step of {projections.chunk_tokens:,} new tokens, "
    traffic += f"about {projections.chunk_s:.2g} s of work, hides {hidden:.0%}"
    console.print(Text(title, style="bold"))
    console.print(Text(f"{traffic}\n"))


def _print_traffic(console: Console, traffic: "TrafficPlan | None") -> None:
    if traffic is None or not traffic.total_bytes:
        return
    title = f"prefill traffic: bytes that a worker receives per layer for {traffic.num_tokens:,} new tokens"
    if traffic.context_bytes:
        title += f", divided by {traffic.strategy}"
    parts = {
        "cp ranks": traffic.context_bytes,
        "attention": traffic.attention_bytes,
        "mlp": traffic.mlp_bytes,
        "experts" if traffic.dispatch is None else f"experts ({traffic.dispatch})": traffic.expert_bytes,
        "projections": traffic.projection_bytes,
        "total": traffic.total_bytes,
    }
    _print_table(console, title, list(parts), [list(map(_size, parts.values()))], num_text=0)


def _print_kv(console: Console, kv: "KvPlan | None") -> None:
    if kv is None:
        console.print(Text("KV memory: unknown; see the checks\n", style="bold"))
        return
    title = f"KV memory: {_size(kv.bytes_per_token)} per token, {kv.page_size} tokens per page"
    for group in kv.groups:
        title += f"\n  {group}"
    rows = [
        (
            role,
            _size(part.page_bytes),
            f"{part.pages_per_worker:,}",
            f"{part.tokens_per_worker:,}",
            _size(part.pool_bytes),
            f"{part.tokens_per_request:,}",
            f"{part.tokens_per_replica:,}",
        )
        for role, part in kv.roles.items()
    ]
    columns = ["per worker", "page", "pages", "tokens", "pool", "longest request", "tokens per replica"]
    _print_table(console, title, columns, rows, num_text=1)
    for role, part in kv.roles.items():
        console.print(Text(f"each {role} worker's host memory: {part.host}\n"))
        if part.gpu is not None:
            console.print(Text(f"each {role} worker: {part.gpu}\n"))


def _print_ports(console: Console, ports: "list[PortPlan]") -> None:
    rows = [
        (port.process, port.purpose, port.host or "the node's address", str(port.port or "any free"), str(port.count))
        for port in ports
    ]
    _print_table(console, "ports", ["process", "purpose", "address", "port", "count"], rows, num_text=3)


def _print_checks(console: Console, checks: "list[CheckResult]", *, verbose: bool) -> None:
    failed = [check for check in checks if not check.passed]
    rows = [
        (
            Text("pass", style="green") if check.passed else Text("FAIL", style="red"),
            Text(check.rule),
            Text(check.detail),
        )
        for check in (checks if verbose else failed)
    ]
    if rows:
        _print_table(console, "checks", ["", "rule", "reason"], rows, num_text=3)
    passed = len(checks) - len(failed)
    console.print(f"{passed} checks pass" + (f", {len(failed)} fail" if failed else ""))


def _size(num_bytes: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"
