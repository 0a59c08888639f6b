"""Clocks, heartbeat and lease times, and the intervals of a trace."""

import time
from functools import cache
from pathlib import Path
from typing import Protocol

import msgspec

HEARTBEAT_S = 1.0
"""Interval between a rank's heartbeats: short enough to notice a lost replica within seconds."""
LEASE_S = 3.0
"""Time without a rank's heartbeat after which its replica gets no requests. Tolerates two lost ones in a row."""
MOST_S = 1_000_000
"""Maximum of a time that users set. JSON, for one, has no infinity."""
IDLE_WAIT_S = 1.0
"""Maximum sleep of an idle worker, and therefore the maximum delay in handling a deadline."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Monotonic clock."""

    def now_s(self) -> float:
        """Return the seconds since an arbitrary start."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class AttentiveClock:
    """Time for which an observer could hear its peers, sans I/O.

    An observer that was stopped or starved has heard nothing meanwhile. A gap between two of its looks therefore counts
    for at most ``longest_s``, so that a peer is not taken for silent because the observer itself was slow.
    """

    def __init__(self, longest_s: float) -> None:
        self._heard_s = 0.0
        """Attentive time at the latest look. It equals the clock's until the first lag."""
        self._longest_s = longest_s
        self._looked_s: float | None = None

    def look(self, now_s: float) -> float:
        """Return the attentive time."""
        if self._looked_s is None:
            self._heard_s = now_s
        else:
            self._heard_s += min(max(now_s - self._looked_s, 0.0), self._longest_s)
        self._looked_s = now_s
        return self._heard_s


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """Timed activity. Intervals of one track are disjoint or nested."""

    track: str
    """Kind of activity: ``request``, ``compute``, ``kv sender``."""
    name: str
    start_s: float
    """Start time; like ``end_s``, on the machine's monotonic clock."""
    end_s: float
    facts: dict[str, int | float | str] = {}
    """Additional attributes."""


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """Offset of a process's monotonic clock from Unix time."""

    machine: str
    """Machine id; processes with the same id share a monotonic clock. Empty for the reader's own machine."""
    unix_offset_s: float
    """Unix time minus monotonic time; across machines, only as accurate as their clocks."""

    def shift_s(self, here: "ClockReading") -> float:
        """Return what to add to times of this clock to get those of ``here``."""
        is_shared = self.machine in ("", here.machine)
        return 0.0 if is_shared else self.unix_offset_s - here.unix_offset_s


def read_clock() -> ClockReading:
    return ClockReading(machine=_machine(), unix_offset_s=time.time() - time.monotonic())


@cache
def _machine() -> str:
    """Return the kernel's boot id, which is the same in all containers of a machine."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "this machine"
