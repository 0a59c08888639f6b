"""Commands of `baton`.

Modules imported here are light. Each command imports what it needs when it runs.
"""

from typing import Annotated

import typer

from cluster.cli import bench, bench_serve, chat, commands, doctor, logs, plan, simulate, status, up
from cluster.spec.version import VERSION


def _show_version(given: bool) -> None:
    if given:
        typer.echo(f"baton {VERSION}")
        raise typer.Exit


app = typer.Typer(
    name="baton",
    help="Serve LLMs with long prompts: context-parallel prefill, disaggregated from decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    del version


app.command("plan")(plan.plan)
app.command("up")(up.up)
app.command("status")(status.status)
app.command("logs")(logs.logs)
app.command("down")(commands.down)
app.command("drain")(commands.drain)
app.command("resume")(commands.resume)
app.command("restart")(commands.restart)
app.command("scale")(commands.scale)
app.command("doctor")(doctor.doctor)
app.command("chat")(chat.chat)
bench_app = typer.Typer(help="Benchmark a running cluster, context parallelism, the engine or kernels.")
bench_app.command("serve")(bench_serve.serve)
bench_app.command("cp")(bench.cp)
bench_app.command("engine")(bench.engine)
bench_app.command("kernels")(bench.kernels)
app.add_typer(bench_app, name="bench")
app.command("simulate")(simulate.simulate)
app.command("schema")(plan.schema)
