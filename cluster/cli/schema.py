"""`baton schema`: keys of a deploy YAML, for editors and for readers."""

import json
from enum import StrEnum
from typing import Annotated

import typer

from cluster.cli.reference import reference_text
from cluster.spec.config import DeployConfig


class Form(StrEnum):
    """Output format."""

    JSON = "json"
    """A JSON schema, for editors."""
    MARKDOWN = "markdown"
    """Tables, for readers."""


def schema_text() -> str:
    """Return the JSON schema, the text of ``deploy/schema.json``."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **DeployConfig.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def schema(
    form: Annotated[Form, typer.Option(help="JSON schema for editors, or Markdown tables for readers.")] = Form.JSON,
) -> None:
    """Print the schema of a deploy YAML as JSON, or the tables of docs/configuration.md."""
    typer.echo(schema_text() if form is Form.JSON else reference_text(), nl=False)
