"""Linux processes, and a guard process that ends the processes of a killed driver."""

import contextlib
import ctypes
import gc
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

INSTALL_FOLDER = Path(__file__).parents[1]
"""Folder that Baton's packages are imported from. Python processes that start elsewhere might import a user's files."""
_POLL_S = 0.02
_SESSION_FIELD = 3
_START_TICKS_FIELD = 19
"""Index of the start time among the fields of ``/proc/PID/stat`` after the command name."""
GRACE_S = 3.0
"""Time for processes to notice that the driver has died, and to exit by themselves."""
_KILL_S = 10.0
_REMOVE_TRIES = 10
GONE = "the driver ended without a message; it was killed, or its Ray node died"
"""Message of a guard whose driver has ended without killing it."""
_TRIM_S = 30.0
_NEW_OBJECTS = 10_000
"""Number of new objects after which the collector looks at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process on one machine; the start time distinguishes it from a later process with the same pid."""

    pid: int
    start_ticks: int

    @property
    def age_s(self) -> float:
        """Seconds since the process started."""
        boot_s = float(Path("/proc/uptime").read_text().split()[0])
        return boot_s - self.start_ticks / os.sysconf("SC_CLK_TCK")


def start_trimming() -> None:
    """Start a thread that returns this process's free memory to the kernel twice a minute.

    glibc keeps memory that was freed in the middle of a heap, and gives a heap to every thread. Under changing load, a
    process with dozens of threads, or with bursts of long prompts, would grow for hours.
    """
    if platform.libc_ver()[0] == "glibc":
        threading.Thread(target=_trim, name="trim", daemon=True).start()


def _trim() -> None:
    trim = ctypes.CDLL(None).malloc_trim
    while True:
        time.sleep(_TRIM_S)
        trim(0)


def freeze_loaded_objects() -> None:
    """Exclude all current objects of this process from garbage collection, once its modules and model are loaded.

    Otherwise the collector traverses them again and again while requests wait, for up to 0.3 s in a worker.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)


def process_id(pid: int) -> ProcessId | None:
    """Return the identity of a process; None if it does not exist."""
    try:
        return ProcessId(pid=pid, start_ticks=int(_stat(str(pid))[_START_TICKS_FIELD]))
    except OSError:
        return None


def this_process() -> ProcessId:
    mine = process_id(int(Path("/proc/self").readlink().name))
    assert mine is not None
    return mine


def is_alive(process: ProcessId) -> bool:
    """Return whether the process exists and is no zombie, so that it can still write to memory."""
    try:
        fields = _stat(str(process.pid))
    except OSError:
        return False
    return int(fields[_START_TICKS_FIELD]) == process.start_ticks and fields[0] not in "ZX"


def wait_gone(processes: list[ProcessId], timeout_s: float) -> bool:
    """Wait until all processes are gone; return False after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while any(is_alive(process) for process in processes):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def kill_all(processes: list[ProcessId], timeout_s: float) -> bool:
    """Kill processes, including stopped ones; return False if one is alive after the timeout."""
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    return wait_gone(processes, timeout_s)


def living_in(sessions: Collection[int]) -> list[ProcessId]:
    """Return the live processes in these sessions, including those whose parent or session leader has died."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            fields = _stat(folder.name)
            if int(fields[_SESSION_FIELD]) in sessions and fields[0] not in "ZX":
                found.append(ProcessId(pid=int(folder.name), start_ticks=int(fields[_START_TICKS_FIELD])))
    return found


def kill_sessions(sessions: Collection[int], timeout_s: float) -> bool:
    """Kill all processes in these sessions, including new ones; return False if one is alive after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while alive := living_in(sessions):
        kill_all(alive, 0.0)
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _stat(name: str) -> list[str]:
    """Return the fields of ``/proc/PID/stat``, starting with the process state."""
    text = (Path("/proc") / name / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rsplit(")", 1)[1].split()


class Guard:
    """Driver's handle to its guard process."""

    def __init__(self, folder: Path) -> None:
        """Start the guard process, which also removes ``folder`` if the driver is killed."""
        self._folder = folder
        self._sessions: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.processes", str(folder.absolute())],
            cwd=INSTALL_FOLDER,
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def watch(self, session: int) -> None:
        """Register a session whose processes must not outlive the driver."""
        self._sessions.append(session)
        assert self._process.stdin is not None
        # If the guard was killed, the driver goes on without it.
        with contextlib.suppress(BrokenPipeError):
            print(session, file=self._process.stdin, flush=True)

    def finish(self, timeout_s: float) -> None:
        """Do the guard's work at an orderly exit: kill the remaining processes and remove the folder."""
        kill_sessions(self._sessions, timeout_s)
        _remove(self._folder)
        self._process.kill()
        self._process.communicate()


def _remove(folder: Path) -> None:
    """Remove a folder, even if a thread of the driver that still waits for dead daemons adds a file meanwhile."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_POLL_S)


def main() -> None:
    """Wait until the driver has ended without killing the guard; say so and kill the registered sessions."""
    sessions = [int(line) for line in sys.stdin]
    with contextlib.suppress(OSError):  # the terminal is gone as well
        print(f"error: {GONE}", file=sys.stderr, flush=True)
    deadline_s = time.monotonic() + GRACE_S
    while living_in(sessions) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    kill_sessions(sessions, _KILL_S)
    _remove(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
