"""Clock interface: everything that waits is given a clock, so that tests and the simulator control time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds of ``time.monotonic``."""
        return time.monotonic()
