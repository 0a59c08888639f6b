"""Commands for a cluster on this machine: `baton status`, `down`, `drain`, `resume`, `restart` and `scale`."""

import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cluster.cli.running import RunningCluster, control_path, find_running, running_clusters
from cluster.processes import wait_gone
from cluster.spec.errors import PeerUnreachableError, UserError
from cluster.spec.ids import ReplicaId
from cluster.spec.registry import TableSnapshot
from cluster.supervisor.commands import (
    DrainCommand,
    OperatorCommand,
    RestartCommand,
    ResumeCommand,
    ScaleCommand,
    StatusCommand,
)

_NAME_HELP = "Name of the cluster; needed if several are running on this machine."
_ROUTER_S = 2.0
"""Maximum wait for the router, whose metrics are an extra."""
_MISMATCHES = r'^baton_parity_probes_total\{result="mismatch"\} (\S+)$'
Replica = Annotated[str, typer.Argument(help="Name of the replica, such as decode-0.", show_default=False)]
Cluster = Annotated[str | None, typer.Option("--cluster", metavar="NAME", help=_NAME_HELP, show_default=False)]
Grace = Annotated[
    float | None,
    typer.Option("--grace", min=0, help="Maximum wait for open requests, in seconds. Default: router.drain_s."),
]


def status(
    name: Cluster = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the state of a cluster that was started on this machine, or list several."""
    if name is None and len(running := running_clusters()) > 1 and not as_json:
        Console(highlight=False, soft_wrap=True).print(_list(running))
        return
    cluster = find_running(name)
    snapshot, troubles = _read_table(cluster), _ask_driver(cluster)
    if as_json:
        typer.echo(_json(cluster, snapshot, troubles))
        return

    endpoint = f"{cluster.router_url}/v1" if cluster.router_url else "starting"
    console = Console(highlight=False, soft_wrap=True)
    up = f"up {_age(cluster.process.age_s)}   driver {cluster.process.pid}"
    console.print(f"{cluster.name}   {endpoint}   model {cluster.model}   {up}", markup=False)
    console.print(f"logs: {cluster.logs}", markup=False)
    if cluster.ray_environ:
        variables = " ".join(f"{name}={value}" for name, value in cluster.ray_environ.items())
        console.print(f"ray tools: export {variables}", markup=False)
    if cluster.ray_dashboard:
        console.print(f"ray dashboard: {cluster.ray_dashboard}", markup=False)
    if snapshot is None:
        console.print("the bootstrap service does not respond; it may be starting or restarting")
    else:
        console.print(_replicas(snapshot))
        console.print(_ranks(snapshot))
    for line in troubles:
        console.print(line, markup=False)
    if cluster.router_url and (count := num_mismatches(cluster.router_url)):
        console.print(f"mismatches found by parity probes: {count}; see `baton logs router`", markup=False)


def _ask_driver(cluster: RunningCluster) -> list[str]:
    """Return the driver's lines about members that are not running, or an empty list if it does not respond."""
    from cluster.cli.control import send_command

    try:
        (answer,) = send_command(control_path(cluster.name), StatusCommand())
    except PeerUnreachableError:
        return []
    return answer.line.splitlines()


def num_mismatches(router_url: str) -> int:
    """Return the number of parity mismatches that a router reports, or 0 if it does not respond."""
    import httpx

    try:
        metrics = httpx.get(f"{router_url}/metrics", timeout=_ROUTER_S).text
    except httpx.HTTPError:
        return 0
    found = re.search(_MISMATCHES, metrics, re.MULTILINE)
    return int(float(found[1])) if found else 0


def _read_table(cluster: RunningCluster) -> TableSnapshot | None:
    from cluster.bootstrap.client import BootstrapClient

    if cluster.bootstrap_url is None:
        return None
    client = BootstrapClient(cluster.bootstrap_url, cluster.token)
    try:
        return client.table()
    except PeerUnreachableError:
        return None
    finally:
        client.close()


def _json(cluster: RunningCluster, snapshot: TableSnapshot | None, troubles: list[str]) -> str:
    fields = {
        "name": cluster.name,
        "model": cluster.model,
        "driver_pid": cluster.process.pid,
        "router_url": cluster.router_url,
        "bootstrap_url": cluster.bootstrap_url,
        "logs": cluster.logs,
        "ray_environ": cluster.ray_environ,
        "ray_dashboard": cluster.ray_dashboard,
        "not_running": troubles,
        "table": snapshot,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()


def _list(clusters: Sequence[RunningCluster]) -> Table:
    table = Table("cluster", "endpoint", "model", "up", "driver", box=None)
    for cluster in clusters:
        endpoint = f"{cluster.router_url}/v1" if cluster.router_url else "starting"
        table.add_row(cluster.name, endpoint, cluster.model, _age(cluster.process.age_s), str(cluster.process.pid))
    return table


def _replicas(snapshot: TableSnapshot) -> Table:
    # Short headers keep the table within 80 columns without truncating names.
    table = Table("replica", "state", "up", "waiting", "running", "tokens", "free pages", "cached", box=None)
    for entry in snapshot.replicas:
        load = entry.load
        state = "draining" if load.draining else "ready" if entry.ready else "not ready"
        counts = [load.num_waiting, load.num_running, load.num_tokens]
        pages = f"{load.free_pages}/{load.total_pages}"
        age = _age(time.time() - entry.incarnation / 1000)
        table.add_row(entry.replica, state, age, *map(str, counts), pages, str(load.cached_pages))
    return table


def _age(seconds: float) -> str:
    """Return a duration in its two largest units, as in "3 h 5 min"."""
    left = max(0, int(seconds))
    counts = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        counts.append((left // size, unit))
        left %= size
    first = next((index for index, (count, _) in enumerate(counts) if count), len(counts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in counts[first : first + 2])


def _ranks(snapshot: TableSnapshot) -> Table:
    table = Table("replica", "rank", "dp", "cp", "tp", "pp", "address", "transfer", box=None)
    for entry in snapshot.replicas:
        for record in entry.ranks:
            ranks = (record.global_rank, record.coords.dp, record.coords.cp, record.coords.tp, record.coords.pp)
            table.add_row(entry.replica, *map(str, ranks), record.address, record.endpoint.backend)
    return table


def down(
    name: Cluster = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Maximum wait for the cluster to stop, in seconds.")
    ] = 120.0,
) -> None:
    """Drain and stop a cluster that was started on this machine."""
    cluster = find_running(name)
    os.kill(cluster.process.pid, signal.SIGTERM)
    typer.echo(f"{cluster.name}: draining", err=True)
    if not wait_gone([cluster.process], timeout_s):
        typer.echo(f"{cluster.name}: process {cluster.process.pid} is still running after {timeout_s:g} s", err=True)
        raise typer.Exit(1)
    typer.echo(f"{cluster.name}: stopped", err=True)


def drain(replica: Replica, cluster: Cluster = None, grace_s: Grace = None) -> None:
    """Stop routing to a replica and wait for its open requests."""
    _give(cluster, DrainCommand(replica=ReplicaId(replica), grace_s=grace_s))


def resume(replica: Replica, cluster: Cluster = None) -> None:
    """Resume routing to a drained replica."""
    _give(cluster, ResumeCommand(replica=ReplicaId(replica)))


def restart(
    replicas: Annotated[
        list[str] | None,
        typer.Argument(metavar="REPLICA", help="Names of the replicas. Default: all.", show_default=False),
    ] = None,
    is_rolling: Annotated[
        bool,
        typer.Option("--rolling", help="Restart one replica at a time, while another of the same role takes requests."),
    ] = False,
    cluster: Cluster = None,
    grace_s: Grace = None,
) -> None:
    """Restart replicas after draining them."""
    names = tuple(ReplicaId(name) for name in replicas or [])
    _give(cluster, RestartCommand(replicas=names, is_rolling=is_rolling, grace_s=grace_s))


def scale(
    numbers: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE=NUMBER",
            help="Number of replicas per role, such as prefill=2 decode=1.",
            show_default=False,
        ),
    ],
    cluster: Cluster = None,
    grace_s: Grace = None,
    wait_s: Annotated[
        float,
        typer.Option("--wait", min=0, help="Maximum wait for machines to join if new replicas need more, in seconds."),
    ] = 0.0,
) -> None:
    """Start more replicas, or drain and stop those with the highest numbers."""
    given = [_number(text) for text in numbers]
    wanted = dict(given)
    if len(wanted) < len(given):
        raise UserError(f"scale: got {' '.join(numbers)}; allowed: each role once")
    command = ScaleCommand(prefill=wanted.get("prefill"), decode=wanted.get("decode"), grace_s=grace_s, wait_s=wait_s)
    _give(cluster, command)


def _number(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if role not in ("prefill", "decode") or not number.isdecimal():
        raise UserError(f"scale: got {text!r}; allowed: prefill=NUMBER and decode=NUMBER")
    return role, int(number)


def _give(name: str | None, command: OperatorCommand) -> None:
    """Print the driver's answers. Exit with code 2 if the driver refuses the command, or 1 if the command fails."""
    from cluster.cli.control import send_command
    from cluster.supervisor.events import Outcome

    cluster = find_running(name)
    try:
        for answer in send_command(control_path(cluster.name), command):
            if answer.outcome is Outcome.REFUSED:
                raise UserError(f"{cluster.name}: {answer.line}")
            typer.echo(f"{cluster.name}: {answer.line}", err=True)
            if answer.outcome is Outcome.FAILED:
                raise typer.Exit(1)
    except PeerUnreachableError as error:
        typer.echo(f"error: {cluster.name}: {error}", err=True)
        raise typer.Exit(1) from None
