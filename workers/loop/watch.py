"""Watchdog that ends a process whose work loop is stuck. A hung main thread raises no error, and the other threads stay
alive.
"""

import logging
import math
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval between checks of the loop, and time limit for writing the log line."""
BETWEEN_STEPS = "between two steps"


class Heartbeat:
    """Heartbeat of a work loop. One thread writes it; any thread may read it."""

    def __init__(self) -> None:
        self.count = 0
        """Progress count: iterations of the loop, and starts and ends of its steps."""
        self.place = BETWEEN_STEPS

    def at(self, place: str) -> None:
        """Report that the loop has reached a location, possibly for another time."""
        self.place = place
        self.count += 1


class LoopWatch:
    """Watchdog thread of a loop, between ``__enter__`` and ``__exit__``.

    It counts its own checks, not seconds: a process that is stopped for an hour and resumes has missed one check.
    """

    def __init__(
        self, heartbeat: Heartbeat, name: str, limit_s: float, end: Callable[[], None], *, look_s: float = LOOK_S
    ) -> None:
        """Prepare the thread, which calls ``end`` once when the loop ``name`` has not progressed for ``limit_s``."""
        self._heartbeat, self._name, self._end, self._look_s = heartbeat, name, end, look_s
        self._max_looks = math.ceil(limit_s / look_s)
        self._seen_count = heartbeat.count
        self._num_still = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def look(self) -> bool:
        """Return whether the loop has been stuck for too long; called every ``look_s``."""
        if self._heartbeat.count != self._seen_count:
            self._seen_count, self._num_still = self._heartbeat.count, 0
        else:
            self._num_still += 1
        return self._num_still >= self._max_looks

    def _run(self) -> None:
        while not self._stopping.wait(self._look_s):
            if self.look():
                self._report()
                self._end()
                return

    def _report(self) -> None:
        """Log the stuck location. The loop may be stuck in logging itself, so this runs in another thread with a time
        limit.
        """
        line = "%s stood still for %g s (resources.step_timeout_s) %s; this process ends"
        args = (line, self._name, self._num_still * self._look_s, self._heartbeat.place)
        reporting = threading.Thread(target=_log.error, args=args, daemon=True)
        reporting.start()
        reporting.join(LOOK_S)


def end_process() -> None:
    """End the process at once, without notice to other threads."""
    os._exit(1)
