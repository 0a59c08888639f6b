"""Watchdog that ends a process whose work loop is stuck, since a stuck main thread raises no error."""

import logging
import math
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval between checks of the loop, and maximum time for writing the log line."""
BETWEEN_STEPS = "between two steps"


class Heartbeat:
    """Heartbeat of a work loop. One thread writes it; any thread may read it."""

    def __init__(self) -> None:
        self.count = 0
        """Number of places that the loop has reached."""
        self.place = BETWEEN_STEPS

    def at(self, place: str) -> None:
        """Record that the loop has reached a place."""
        self.place = place
        self.count += 1


class LoopWatch:
    """Watchdog thread of a loop, between ``__enter__`` and ``__exit__``.

    It counts its checks, not seconds, so a process that was suspended for an hour has missed only one check.
    """

    def __init__(
        self, heartbeat: Heartbeat, name: str, limit_s: float, end: Callable[[], None], *, look_s: float = LOOK_S
    ) -> None:
        """Build a watchdog, which calls ``end`` once when the loop ``name`` has not progressed for ``limit_s``."""
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
        """Log where the loop is stuck: in another thread, since it may be stuck in logging."""
        line = "%s stood still for %g s (resources.step_timeout_s) %s; this process ends"
        args = (line, self._name, self._num_still * self._look_s, self._heartbeat.place)
        reporting = threading.Thread(target=_log.error, args=args, daemon=True)
        reporting.start()
        reporting.join(LOOK_S)


def end_process() -> None:
    """End the process immediately, whatever its other threads do."""
    os._exit(1)
