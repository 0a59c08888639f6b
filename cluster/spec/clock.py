"""Time: clocks, the pulse of a cluster, and intervals of a trace with the clock that measured them."""

import time
from functools import cache
from pathlib import Path
from typing import Protocol

import msgspec

HEARTBEAT_S = 1.0
"""Interval between the heartbeats of a rank: a lost replica is noticed within seconds, at next to no load."""
LEASE_S = 3.0
"""Silence of a leader after which its replica gets no requests: two lost heartbeats in a row are still forgiven."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Monotonic seconds."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


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
    return ClockReading(machine=_machine(), unix_offset_s=time.time() - time.monotonic())


@cache
def _machine() -> str:
    """Return the running kernel's id, which all its containers share."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "this machine"
