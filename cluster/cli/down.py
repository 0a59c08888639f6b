"""`baton down`: ask a running cluster to drain and stop, and wait until it is gone."""

import os
import signal
from typing import Annotated

import typer


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
