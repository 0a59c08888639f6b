"""The `baton` command: its sub-commands, and how a user error ends it (message on stderr, exit code 2).

Every module imported here is light; a command imports what it needs when it runs.
"""

import sys

import typer

from cluster.cli import (
    bench,
    bench_local,
    bench_serve,
    chat,
    commands,
    doctor,
    plan,
    simulate,
    status,
    up,
)
from cluster.spec.errors import UserError

app = typer.Typer(
    name="baton",
    help="Serve long-context language models: context-parallel prefill, separate decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("up")(up.up)
app.command("status")(status.status)
app.command("down")(status.down)
app.command("drain")(commands.drain)
app.command("resume")(commands.resume)
app.command("restart")(commands.restart)
app.command("scale")(commands.scale)
app.command("doctor")(doctor.doctor)
app.command("chat")(chat.chat)
bench.bench.command("serve")(bench_serve.serve)
bench.bench.command("cp")(bench_local.cp)
bench.bench.command("engine")(bench_local.engine)
bench.bench.command("kernels")(bench_local.kernels)
app.add_typer(bench.bench, name="bench")
app.command("simulate")(simulate.simulate)
app.command("schema")(plan.schema)


def main() -> None:
    """Run the command line; never returns normally."""
    try:
        app()
    except UserError as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(2)
