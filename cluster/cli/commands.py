"""`baton drain`, `resume`, `restart` and `scale`: commands for the driver of a cluster on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from cluster.spec.errors import UserError

if TYPE_CHECKING:
    from cluster.supervisor.commands import Command

Replica = Annotated[str, typer.Argument(help="Name of the replica, such as decode-0.", show_default=False)]
Name = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME", help="Name of the cluster, if several are running here.", show_default=False
    ),
]
Grace = Annotated[
    float | None,
    typer.Option("--grace", min=0, help="Maximum wait for open requests, in seconds; router.drain_s by default."),
]


def drain(replica: Replica, cluster: Name = None, grace_s: Grace = None) -> None:
    """Drain a replica: stop routing to it and wait for its requests in flight."""
    from cluster.spec.ids import ReplicaId
    from cluster.supervisor.commands import DrainCommand

    _give(cluster, DrainCommand(replica=ReplicaId(replica), grace_s=grace_s))


def resume(replica: Replica, cluster: Name = None) -> None:
    """Resume routing to a drained replica."""
    from cluster.spec.ids import ReplicaId
    from cluster.supervisor.commands import ResumeCommand

    _give(cluster, ResumeCommand(replica=ReplicaId(replica)))


def restart(
    replicas: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REPLICA]...", help="Names of the replicas; all by default.", show_default=False),
    ] = None,
    is_rolling: Annotated[
        bool, typer.Option("--rolling", help="Restart one replica at a time, while another of its role takes requests.")
    ] = False,
    cluster: Name = None,
    grace_s: Grace = None,
) -> None:
    """Restart replicas after draining them."""
    from cluster.spec.ids import ReplicaId
    from cluster.supervisor.commands import RestartCommand

    names = tuple(ReplicaId(name) for name in replicas or [])
    _give(cluster, RestartCommand(replicas=names, is_rolling=is_rolling, grace_s=grace_s))


def scale(
    numbers: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE=NUMBER...", help="Numbers of replicas, such as prefill=2 decode=1.", show_default=False
        ),
    ],
    cluster: Name = None,
    grace_s: Grace = None,
) -> None:
    """Start more replicas, or drain and stop those with the highest numbers."""
    from cluster.supervisor.commands import ScaleCommand

    given = [_number(text) for text in numbers]
    wanted = dict(given)
    if len(wanted) < len(given):
        raise UserError(f"scale: got {' '.join(numbers)}; allowed: each role once")
    _give(cluster, ScaleCommand(prefill=wanted.get("prefill"), decode=wanted.get("decode"), grace_s=grace_s))


def _number(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if role not in ("prefill", "decode") or not number.isdecimal():
        raise UserError(f"scale: got {text!r}; allowed: prefill=NUMBER and decode=NUMBER")
    return role, int(number)


def _give(name: str | None, command: "Command") -> None:
    """Print the driver's responses; exit code 2 if it refuses, 1 if the command was not fully carried out."""
    from cluster.cli.control import send_command
    from cluster.cli.running import control_path, find_running
    from cluster.spec.errors import PeerUnreachableError
    from cluster.supervisor.events import Outcome

    cluster = find_running(name)
    try:
        for answer in send_command(control_path(cluster.name), command):
            if answer.outcome is Outcome.REFUSED:
                raise UserError(answer.line)
            typer.echo(answer.line, err=True)
            if answer.outcome is Outcome.FAILED:
                raise typer.Exit(1)
    except PeerUnreachableError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
