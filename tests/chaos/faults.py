"""Faults that are put into a running cluster, each with a proof that it happened."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GONE = "gone"
SEEN_S = 30.0


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does; ``gone`` for none, and for a dead one that nobody has waited for."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    return GONE if letter in "ZX" else letter


def kill(who: str, pid: int) -> str:
    """End a process at once; the proof that it is gone."""
    os.kill(pid, signal.SIGKILL)
    _wait_state(pid, GONE)
    return f"SIGKILL: process {pid} ({who}) is gone"


@contextmanager
def stopped(who: str, pid: int) -> Iterator[str]:
    """Let a process stand still; gives the proof. It goes on afterwards, unless somebody has ended it."""
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
