"""What a process says of one request that is timed: intervals on its own clock, and how that clock stands."""

import time
from functools import cache
from pathlib import Path

import msgspec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time. Intervals of one lane lie beside each other or inside each other."""

    lane: str
    """What kind of thing it is: ``request``, ``compute``, ``kv sender``."""
    name: str
    start_s: float
    """On the monotonic clock of the process's machine, like ``end_s``."""
    end_s: float
    facts: dict[str, int | float | str] = {}
    """What else is known of it."""


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """How a process's monotonic clock stands to those of others."""

    machine: str
    """Processes with the same one read the same monotonic clock."""
    unix_offset_s: float
    """Unix time less monotonic time; between machines as good as their clocks are kept."""


def read_clock() -> ClockReading:
    """This process's clock."""
    return ClockReading(machine=_machine(), unix_offset_s=time.time() - time.monotonic())


@cache
def _machine() -> str:
    """The running kernel's id, which all its containers share."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "this machine"
