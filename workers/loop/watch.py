"""Watchdog that ends a process whose work loop is stuck, since a stuck main thread raises no error."""

import logging
import math
import os
import threading
from collections.abc import Callable
from typing import Self

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval between checks of the loop. It is also the maximum time for writing the log line."""
BETWEEN_STEPS = "between two steps"


class LoopProgress:
    """Progress of a work loop. One thread records it, and any thread may read it."""

    def __init__(self) -> None:
        self.count = 0
        """Number of positions recorded so far."""
        self.position = BETWEEN_STEPS

    def at(self, position: str) -> None:
        """Record that the loop has reached a position."""
        self.position = position
        self.count += 1


class LoopWatch:
    """Watchdog thread of a loop. Runs between ``__enter__`` and ``__exit__``.

    The watchdog counts its own checks instead of seconds, so a process that was suspended for an hour has missed only
    one check.
    """

    def __init__(
        self, progress: LoopProgress, name: str, limit_s: float, end: Callable[[], None], *, look_s: float = LOOK_S
    ) -> None:
        """Create a watchdog, which calls ``end`` once if the loop ``name`` has made no progress for ``limit_s``."""
        self._progress, self._name, self._end, self._look_s = progress, name, end, look_s
        self._max_looks = math.ceil(limit_s / look_s)
        self._seen_count = progress.count
        self._num_still = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def look(self) -> bool:
        """Return whether the loop has been stuck for too long. Called every ``look_s`` seconds."""
        if self._progress.count != self._seen_count:
            self._seen_count, self._num_still = self._progress.count, 0
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
        """Log where the loop is stuck. Use another thread, since the loop may be stuck in logging."""
        line = "%s made no progress for %g s (resources.step_timeout_s) %s; ending this process"
        args = (line, self._name, self._num_still * self._look_s, self._progress.position)
        reporting = threading.Thread(target=_log.error, args=args, daemon=True)
        reporting.start()
        reporting.join(LOOK_S)


def end_process() -> None:
    """End the process immediately, regardless of its other threads."""
    os._exit(1)
