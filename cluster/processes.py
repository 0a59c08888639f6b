"""Operating-system processes as Linux shows them: is this one still there, wait until it is not, see to it."""

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
"""Of the fields of ``/proc/PID/stat`` after the command name, as the one above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process on one machine; the start time tells it from a later one with the same number."""

    pid: int
    start_ticks: int


def this_process() -> ProcessId:
    """The calling process."""
    start_ticks = int(_stat("self")[_START_TICKS_FIELD])
    return ProcessId(pid=int(Path("/proc/self").readlink().name), start_ticks=start_ticks)


def is_alive(process: ProcessId) -> bool:
    """Whether the process can still touch memory; one that only waits for its parent cannot."""
    try:
        fields = _stat(str(process.pid))
    except OSError:
        return False
    return int(fields[_START_TICKS_FIELD]) == process.start_ticks and fields[0] not in "ZX"


def wait_gone(processes: list[ProcessId], timeout_s: float) -> bool:
    """Wait until none of the processes is alive; False when one still is after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while any(is_alive(process) for process in processes):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def kill_all(processes: list[ProcessId], timeout_s: float) -> bool:
    """Kill these processes, also those that stand still; False when one is alive after the timeout."""
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    return wait_gone(processes, timeout_s)


def living_in(sessions: Collection[int]) -> list[ProcessId]:
    """The living processes of these sessions; a session outlives its leader, and a process its parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = _stat(folder.name)
            if int(fields[_SESSION_FIELD]) in sessions and fields[0] not in "ZX":
                found.append(ProcessId(pid=int(folder.name), start_ticks=int(fields[_START_TICKS_FIELD])))
    return found


def kill_sessions(sessions: Collection[int], timeout_s: float) -> bool:
    """Kill every process of these sessions, also those just being born; False when one is still there in the end."""
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
    """The fields of ``/proc/PID/stat`` after the command name, from the state's letter on."""
    text = (Path("/proc") / name / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rsplit(")", 1)[1].split()
