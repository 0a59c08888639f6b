"""Commands for a cluster on this machine: `baton down`, `drain`, `resume`, `restart` and `scale`."""

import math
import os
import signal
from typing import Annotated

import typer

from cluster.cli.running import control_path, find_running
from cluster.processes import wait_gone
from cluster.spec.clock import MOST_S
from cluster.spec.errors import PeerUnreachableError, UserError
from cluster.spec.ids import ReplicaId
from cluster.supervisor.commands import (
    DrainCommand,
    OperatorCommand,
    RestartCommand,
    ResumeCommand,
    ScaleCommand,
)

_NAME_HELP = "Name of the cluster; needed if several are running on this machine."
Replica = Annotated[str, typer.Argument(help="Name of the replica, such as decode-0.", show_default=False)]
Cluster = Annotated[str | None, typer.Option("--cluster", metavar="NAME", help=_NAME_HELP, show_default=False)]
Grace = Annotated[
    float | None,
    typer.Option(
        "--grace", min=0, max=MOST_S, help="Maximum wait for open requests, in seconds. Default: router.drain_s."
    ),
]


def down(
    name: Cluster = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0,
            help="Maximum wait for the cluster to stop, in seconds. Default: no limit.",
            show_default=False,
        ),
    ] = math.inf,
) -> None:
    """Drain and stop a cluster that was started on this machine. Repeat to stop it immediately."""
    cluster = find_running(name)
    os.kill(cluster.process.pid, signal.SIGTERM)
    typer.echo(f"{cluster.name}: draining and stopping; repeat to stop immediately", err=True)
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
        typer.Option(
            "--wait",
            min=0,
            max=MOST_S,
            help="Maximum wait for machines to join if new replicas need more, in seconds.",
        ),
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
