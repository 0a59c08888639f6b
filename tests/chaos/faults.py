"""Faults that are injected into a running cluster, each with a proof that it happened."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GONE = "gone"
SEEN_S = 30.0


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process state, or ``gone`` if the process is missing or a zombie."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    return GONE if letter in "ZX" else letter


def kill(who: str, pid: int) -> str:
    """Kill a process. Return the proof that it is gone."""
    os.kill(pid, signal.SIGKILL)
    _wait_state(pid, GONE)
    return f"SIGKILL: process {pid} ({who}) is gone"


@contextmanager
def stopped(who: str, pid: int) -> Iterator[str]:
    """Stop a process with SIGSTOP and yield the proof. Afterwards it continues, unless it has been killed."""
    os.kill(pid, signal.SIGSTOP)
    try:
        _wait_state(pid, "T")
        yield f"SIGSTOP: process {pid} ({who}) is in state T"
    finally:
        if state_of(pid) == "T":
            os.kill(pid, signal.SIGCONT)


def _wait_state(pid: int, state: str) -> None:
    deadline_s = time.monotonic() + SEEN_S
    while (found := state_of(pid)) != state:
        assert time.monotonic() < deadline_s, f"process {pid} is in state {found}, not {state}"
        time.sleep(0.01)
