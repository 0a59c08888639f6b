"""`baton plan` and `baton schema`: what a deploy YAML would start, and what it may hold."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
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
    from cluster.planner.plan import make_plan

    config = load_config(file, overrides(changes or [], model))
    made = make_plan(config, read_model(config))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(made), indent=2))
    else:
        from cluster.cli.plan_tables import print_plan

        print_plan(made)
    if not all(check.passed for check in made.checks):
        raise typer.Exit(1)


def overrides(changes: Sequence[str], model: str | None) -> dict[str, str]:
    """Return dotted keys and their texts, for ``load_config``.

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
    """Print the JSON schema of a deploy YAML."""
    typer.echo(schema_text(), nl=False)
