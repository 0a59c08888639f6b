"""The keys of the deploy YAML about logs."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cluster.spec.config_node import Node


class LogFormat(StrEnum):
    """Formats of log records."""

    TEXT = "text"
    """Lines for people to read."""
    JSON = "json"
    """One JSON object per line."""


class LogConfig(Node):
    """The log that processes write to standard error, and Ray keeps. It never holds prompts, answers or keys."""

    format: LogFormat = LogFormat.TEXT
    """Format of log records: `text`, or `json`, one object per line, with room, replica and request id where known."""
    requests: Annotated[bool, Field(strict=True)] = False
    """Log a record for every request: its client, its replicas, and the time of each phase."""
