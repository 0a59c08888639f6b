"""Leftovers of a test session: processes that it started, directly or not, and Baton's shared memory."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "BATON_TEST_SESSION"
"""Environment variable that every process of the session inherits, even one whose parent has died."""
GRACE_S = 10.0
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own helpers, which end with the test process."""


@dataclass(frozen=True, slots=True)
class Before:
    """Processes and files when the session began."""

    shared_files: frozenset[Path]

    @classmethod
    def now(cls) -> "Before":
        """Mark this process and its future children, and record what exists."""
        os.environ.setdefault(MARK, str(os.getpid()))
        return cls(frozenset(_shared_files()))


def find_leftovers(before: Before) -> list[str]:
    """Return one line per process and file left behind. Wait up to ``GRACE_S`` for processes that are just ending."""
    deadline_s = time.monotonic() + GRACE_S
    while (processes := find_processes(MARK, os.environ[MARK])) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    files = [f"file {path}" for path in _shared_files() if path not in before.shared_files]
    return processes + files


def _shared_files() -> list[Path]:
    """Return files in shared memory. Baton makes none, because its shared memory has no name."""
    return sorted(Path("/dev/shm").glob("*baton*"))


def find_processes(mark: str, value: str) -> list[str]:
    """Return one line per living process, other than this one, that has a variable with this value."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended, or belongs to another user
        is_other = folder.name != str(os.getpid()) and command and not _is_helper(command)
        if is_other and f"{mark}={value}".encode() in environ:
            found.append(f"process {folder.name}: {command[:200]}")
    return found


def _is_helper(command: str) -> bool:
    return any(helper in command for helper in _HELPERS)
