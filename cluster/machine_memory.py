"""Memory of the machine, or of the container's control group if that is smaller."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_GROUP_FILES = ("memory.max", "memory.current", "memory.stat", "memory.swap.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Memory in bytes; 0 if the kernel does not report it."""

    total: int
    """Total memory, including swap."""
    available: int
    """Memory that can be allocated without swapping."""
    is_limited: bool = False
    """True if a control group has less memory than the machine."""

    @property
    def owner(self) -> str:
        """Name of the machine or container that sets the limit, for messages."""
        return "this container" if self.is_limited else "this machine"

    @classmethod
    def of(cls, meminfo: str, group: Mapping[str, str]) -> Self:
        """Parse the text of /proc/meminfo, and the texts of the control group's files by file name."""
        kib = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)}
        total, swap, available = (kib.get(key, 0) * 1024 for key in ("MemTotal", "SwapTotal", "MemAvailable"))
        limit = _number(group.get("memory.max"))
        if limit is None:
            return cls(total=total + swap, available=available)
        swap_limit = _number(group.get("memory.swap.max"))
        swap = swap if swap_limit is None else min(swap, swap_limit)
        # The kernel reclaims inactive file pages.
        cached = re.search(r"^inactive_file (\d+)", group.get("memory.stat", ""), re.MULTILINE)
        left = limit - (_number(group.get("memory.current")) or 0) + (int(cached[1]) if cached else 0)
        return cls(total=min(total, limit) + swap, available=max(0, min(available, left)), is_limited=limit < total)


def machine_memory(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> MachineMemory:
    files = {name: text for name in _GROUP_FILES if (text := _read(group / name)) is not None}
    return MachineMemory.of(_read(meminfo) or "", files)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    """Parse a number; return None if it is missing or ``max``."""
    return int(text) if text is not None and text.strip().isdigit() else None
