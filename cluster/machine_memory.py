"""How much memory there is and can be had: the machine's, or what the control group of a container leaves of it."""

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
    """In bytes; 0 where the kernel does not say."""

    total: int
    """With what may be swapped out."""
    available: int
    """Without swapping, or pushing others out."""
    is_limited: bool = False
    """Whether a control group may have less than the machine."""

    @property
    def owner(self) -> str:
        """Whose it is, in words."""
        return "this container" if self.is_limited else "this machine"

    @classmethod
    def of(cls, meminfo: str, group: Mapping[str, str]) -> Self:
        """From the text of /proc/meminfo, and those of the control group's files by name, where there is one."""
        kib = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)}
        total, swap, available = (kib.get(key, 0) * 1024 for key in ("MemTotal", "SwapTotal", "MemAvailable"))
        limit = _number(group.get("memory.max"))
        if limit is None:
            return cls(total=total + swap, available=available)
        swap_limit = _number(group.get("memory.swap.max"))
        swap = swap if swap_limit is None else min(swap, swap_limit)
        # The kernel gives back files that nobody has used for long.
        cached = re.search(r"^inactive_file (\d+)", group.get("memory.stat", ""), re.MULTILINE)
        left = limit - (_number(group.get("memory.current")) or 0) + (int(cached[1]) if cached else 0)
        return cls(total=min(total, limit) + swap, available=max(0, min(available, left)), is_limited=limit < total)


def machine_memory(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> MachineMemory:
    """As it is now."""
    files = {name: text for name in _GROUP_FILES if (text := _read(group / name)) is not None}
    return MachineMemory.of(_read(meminfo) or "", files)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    """None for what is not said, and for ``max``."""
    return int(text) if text is not None and text.strip().isdigit() else None
