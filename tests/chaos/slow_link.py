"""Slow network link between two hosts, and the data that the kernel still has to send."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.chaos.two_hosts import AWAY, HOME_END


@contextmanager
def slow(rate: str) -> Iterator[None]:
    """Limit this host's outgoing traffic to ``rate``, in the syntax of ``tc``."""
    shaper = ["dev", HOME_END, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
    with _set(["tc", "qdisc", "add", *shaper], ["tc", "qdisc", "del", *shaper[:3]]):
        yield


def unsent(state: str, least: int) -> dict[str, int]:
    """Return the unacknowledged bytes by connection, for those in this ``ss`` state with at least ``least``."""
    look = ["ss", "-Htn", "state", state, "dst", AWAY]
    shown = subprocess.run(look, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in shown.splitlines()]
    return {f"{row[2]}-{row[3]}": int(row[1]) for row in rows if int(row[1]) >= least}


def acknowledged() -> set[str]:
    """Return connections that this host has closed and whose bytes have all been acknowledged."""
    return {connection for state in ("fin-wait-2", "time-wait") for connection in unsent(state, 0)}


@contextmanager
def _set(do: list[str], undo: list[str]) -> Iterator[None]:
    _run(do)
    try:
        yield
    finally:
        _run(undo)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
