"""Trace of one request in one process: intervals on its own clock, and how to convert that clock."""

import time
from functools import cache
from pathlib import Path

import msgspec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time. Intervals of one lane are disjoint or nested."""

    lane: str
    """Kind of activity: ``request``, ``compute``, ``kv sender``."""
    name: str
    start_s: float
    """Start on the monotonic clock of the process's machine, like ``end_s``."""
    end_s: float
    facts: dict[str, int | float | str] = {}
    """Further attributes."""


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """Relation of a process's monotonic clock to those of others."""

    machine: str
    """Machine id; processes with the same one read the same monotonic clock."""
    unix_offset_s: float
    """Unix time minus monotonic time; between machines it is as accurate as their clocks."""


def read_clock() -> ClockReading:
    """Read this process's clock."""
    return ClockReading(machine=_machine(), unix_offset_s=time.time() - time.monotonic())


@cache
def _machine() -> str:
    """Return the running kernel's id, which all its containers share."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "this machine"
