"""Operating-system processes as Linux shows them: check that one is alive, wait for its end, kill it."""

import contextlib
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.02
_SESSION_FIELD = 3
_START_TICKS_FIELD = 19
"""Index of the start time among the fields of ``/proc/PID/stat`` after the command name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process on one machine; the start time distinguishes it from a later process with the same number."""

    pid: int
    start_ticks: int


def this_process() -> ProcessId:
    start_ticks = int(_stat("self")[_START_TICKS_FIELD])
    return ProcessId(pid=int(Path("/proc/self").readlink().name), start_ticks=start_ticks)


def is_alive(process: ProcessId) -> bool:
    """Return whether the process can still touch memory; a zombie cannot."""
    try:
        fields = _stat(str(process.pid))
    except OSError:
        return False
    return int(fields[_START_TICKS_FIELD]) == process.start_ticks and fields[0] not in "ZX"


def wait_gone(processes: list[ProcessId], timeout_s: float) -> bool:
    """Wait until all processes are gone; False when one is still alive after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while any(is_alive(process) for process in processes):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def kill_all(processes: list[ProcessId], timeout_s: float) -> bool:
    """Kill these processes, including stopped ones; False when one is alive after the timeout."""
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    return wait_gone(processes, timeout_s)


def living_in(sessions: Collection[int]) -> list[ProcessId]:
    """Return the living processes of these sessions; a session outlives its leader, and a process its parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = _stat(folder.name)
            if int(fields[_SESSION_FIELD]) in sessions and fields[0] not in "ZX":
                found.append(ProcessId(pid=int(folder.name), start_ticks=int(fields[_START_TICKS_FIELD])))
    return found


def kill_sessions(sessions: Collection[int], timeout_s: float) -> bool:
    """Kill every process of these sessions, including those forked meanwhile; False when one is alive after the
    timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    while alive := living_in(sessions):
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _stat(name: str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the command name, from the state's letter on."""
    text = (Path("/proc") / name / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rsplit(")", 1)[1].split()
