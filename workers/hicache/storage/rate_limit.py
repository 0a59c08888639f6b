"""Limit of bytes per second."""

import time
from collections.abc import Callable


class RateLimit:
    """Limiter that makes one thread wait, so that over any period it moves no more than the rate allows plus one
    piece.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Build a limiter; without a rate nothing waits."""
        self._bytes_per_s = bytes_per_s
        self._now_s = now_s
        self._sleep = sleep
        self._free_at_s = 0.0

    def wait(self, num_bytes: int, until_s: float) -> bool:
        """Wait before moving this many bytes; return False at once if the wait would not end before ``until_s``."""
        if self._bytes_per_s is None:
            return True
        now_s = self._now_s()
        start_s = max(now_s, self._free_at_s)
        if start_s >= until_s:
            return False
        if start_s > now_s:
            self._sleep(start_s - now_s)
        self._free_at_s = start_s + num_bytes / self._bytes_per_s
        return True
