"""Waits of tests for other threads and processes."""

import time
from collections.abc import Callable

WAIT_S = 60.0


def wait_until(condition: Callable[[], object], problem: str = "waited too long") -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, problem
        time.sleep(0.005)
