"""`baton plan`: show what a deploy YAML would start, without starting it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.overrides import overrides
from cluster.spec.loader import load_config


def plan(
    file: Annotated[Path, typer.Argument(help="Deploy YAML.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    model: Annotated[str | None, typer.Option(help="Use this model instead of the file's.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the file; repeatable.")
    ] = None,
) -> None:
    """Show the replicas, ranks, groups, KV memory, ports and checks of a deploy YAML; start nothing.

    Exit code 1: a check fails.
    """
    # Each command imports what it needs, so that the command line starts quickly.
    from cluster.planner.model import read_model
    from cluster.planner.plan import make_plan, plan_json

    config = load_config(file, overrides(changes or [], model))
    made = make_plan(config, read_model(config))
    if as_json:
        typer.echo(json.dumps(plan_json(made), indent=2))
    else:
        from cluster.cli.plan_tables import print_plan

        print_plan(made)
    if not all(check.passed for check in made.checks):
        raise typer.Exit(1)
