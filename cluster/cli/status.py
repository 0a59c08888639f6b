"""`baton status` and `baton down`: show a running cluster from its rank table, and stop it."""

import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.cli.running import RunningCluster
    from cluster.spec.registry import TableSnapshot


def status(
    name: Annotated[
        str | None, typer.Argument(help="Name of the cluster, if several are running here.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the state of a cluster that was started on this machine."""
    from cluster.cli.running import find_running

    cluster = find_running(name)
    snapshot, troubles = _read_table(cluster), _ask_driver(cluster)
    if as_json:
        typer.echo(_json(cluster, snapshot, troubles))
        return
    from rich.console import Console

    endpoint = f"{cluster.router_url}/v1" if cluster.router_url else "starting"
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{cluster.name}   {endpoint}   model {cluster.model}   driver {cluster.process.pid}", markup=False)
    if snapshot is None:
        console.print("the bootstrap service does not respond; it is starting, or being replaced")
    else:
        console.print(_replicas(snapshot))
        console.print(_ranks(snapshot))
    for line in troubles:
        console.print(line, markup=False)


def _ask_driver(cluster: "RunningCluster") -> list[str]:
    """Return the members that are not running, and how often they failed; nothing if the driver does not respond."""
    from cluster.cli.control import send_command
    from cluster.cli.running import control_path
    from cluster.spec.errors import PeerUnreachableError
    from cluster.supervisor.commands import StatusCommand

    try:
        (answer,) = send_command(control_path(cluster.name), StatusCommand())
    except PeerUnreachableError:
        return []
    return answer.line.splitlines()


def _read_table(cluster: "RunningCluster") -> "TableSnapshot | None":
    from cluster.bootstrap.client import BootstrapClient
    from cluster.spec.errors import PeerUnreachableError

    if cluster.bootstrap_url is None:
        return None
    client = BootstrapClient(cluster.bootstrap_url, cluster.token)
    try:
        return client.table()
    except PeerUnreachableError:
        return None
    finally:
        client.close()


def _json(cluster: "RunningCluster", snapshot: "TableSnapshot | None", troubles: list[str]) -> str:
    import msgspec

    what = {
        "name": cluster.name,
        "model": cluster.model,
        "driver_pid": cluster.process.pid,
        "router_url": cluster.router_url,
        "bootstrap_url": cluster.bootstrap_url,
        "not_running": troubles,
        "table": snapshot,
    }
    return msgspec.json.format(msgspec.json.encode(what), indent=2).decode()


def _replicas(snapshot: "TableSnapshot") -> "Table":
    from rich.table import Table

    # Short headers: the table must fit into 80 columns without truncating names.
    table = Table("replica", "state", "incarnation", "wait", "run", "tokens", "free pages", "cached", box=None)
    for entry in snapshot.replicas:
        load = entry.load
        state = "draining" if load.draining else "ready" if entry.ready else "not ready"
        counts = [load.num_waiting, load.num_running, load.num_tokens]
        pages = f"{load.free_pages}/{load.total_pages}"
        table.add_row(entry.replica, state, str(entry.incarnation), *map(str, counts), pages, str(load.cached_pages))
    return table


def _ranks(snapshot: "TableSnapshot") -> "Table":
    from rich.table import Table

    table = Table("replica", "rank", "dp", "cp", "tp", "pp", "address", "transfer", box=None)
    for entry in snapshot.replicas:
        for row in entry.rows:
            at = row.coords
            place = (row.global_rank, at.dp, at.cp, at.tp, at.pp)
            table.add_row(entry.replica, *map(str, place), row.address, row.endpoint.backend)
    return table


def down(
    name: Annotated[
        str | None, typer.Argument(help="Name of the cluster, if several are running here.", show_default=False)
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Maximum wait for it to stop, in seconds.")
    ] = 120.0,
) -> None:
    """Drain a cluster that was started on this machine and stop it."""
    from cluster.cli.running import find_running
    from cluster.processes import wait_gone

    cluster = find_running(name)
    os.kill(cluster.process.pid, signal.SIGTERM)
    typer.echo(f"{cluster.name}: draining", err=True)
    if not wait_gone([cluster.process], timeout_s):
        typer.echo(f"{cluster.name}: process {cluster.process.pid} is still running after {timeout_s:g} s", err=True)
        raise typer.Exit(1)
    typer.echo(f"{cluster.name}: stopped", err=True)
