"""The part of the deploy YAML about logs."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cluster.spec.config_node import Node


class LogFormat(StrEnum):
    """How processes write what happens."""

    TEXT = "text"
    """Lines for people."""
    JSON = "json"
    """One JSON object a line."""


class LogConfig(Node):
    """What processes write to standard error; Ray keeps it with its logs. Never prompts, answers or keys."""

    format: LogFormat = LogFormat.TEXT
    """`text` for people, or `json`: one object a line, with room, replica and request id where there are any."""
    requests: Annotated[bool, Field(strict=True)] = False
    """Whether the router writes a record for every request: who asked, where it ran, the time of each phase."""
