"""The word that the checks of `baton doctor` answer with."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    """Something works less well, or not at all in some topologies."""
    FAIL = "fail"
    """The default cluster does not start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    status: Status
    found: str
    mend: str = ""
    """What to do about it; empty when all is well."""
