"""Ends a process whose work loop stands still: a hung main thread raises nothing, and others go on showing life."""

import logging
import math
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the loop; the log gets as long to take its line."""
BETWEEN_STEPS = "between two steps"


class Turns:
    """What a work loop writes of its course. One thread writes, any may read."""

    def __init__(self) -> None:
        self.count = 0
        """Moves so far: turns of the loop, and beginnings and ends of its steps."""
        self.place = BETWEEN_STEPS

    def at(self, place: str) -> None:
        """The loop has come to another place, or to the same once more."""
        self.place = place
        self.count += 1


class LoopWatch:
    """A thread that looks whether a loop still turns, between ``__enter__`` and ``__exit__``.

    It counts its own looks, not seconds: a process that is stopped for an hour and goes on has missed one look.
    """

    def __init__(
        self, turns: Turns, name: str, limit_s: float, end: Callable[[], None], *, look_s: float = LOOK_S
    ) -> None:
        """``end`` is called, on the thread and once, when the loop ``name`` has not moved for ``limit_s``."""
        self._turns, self._name, self._end, self._look_s = turns, name, end, look_s
        self._max_looks = math.ceil(limit_s / look_s)
        self._seen_count = turns.count
        self._num_still = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The loop is over; nothing is ended any more."""
        self._stopping.set()
        self._thread.join()

    def look(self) -> bool:
        """Whether the loop has stood still for too long, seen once every ``look_s``."""
        if self._turns.count != self._seen_count:
            self._seen_count, self._num_still = self._turns.count, 0
        else:
            self._num_still += 1
        return self._num_still >= self._max_looks

    def _run(self) -> None:
        while not self._stopping.wait(self._look_s):
            if self.look():
                self._tell()
                self._end()
                return

    def _tell(self) -> None:
        """The loop may stand still in the log itself; so its line is waited for on another thread, and not for long."""
        line = "%s stood still for %g s (resources.step_timeout_s) %s; this process ends"
        args = (line, self._name, self._num_still * self._look_s, self._turns.place)
        telling = threading.Thread(target=_log.error, args=args, daemon=True)
        telling.start()
        telling.join(LOOK_S)


def end_process() -> None:
    """At once, without a word to any other thread."""
    os._exit(1)
