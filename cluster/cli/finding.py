"""Result type of the checks of `baton doctor`."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """A feature works less well, or not at all in some topologies."""
    FAIL = "fail"
    """The default cluster does not start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    status: Status
    found: str
    mend: str = ""
    """Suggested fix; empty if there is nothing to fix."""
