"""`baton schema`: JSON schema of a deploy YAML, for editors."""

import json

import typer

from cluster.spec.config import DeployConfig


def schema_text() -> str:
    """Return the JSON schema, the text of ``deploy/schema.json``."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **DeployConfig.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def schema() -> None:
    """Print the JSON schema of a deploy YAML."""
    typer.echo(schema_text(), nl=False)
