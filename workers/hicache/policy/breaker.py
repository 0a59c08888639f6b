"""Circuit breaker for a storage backend. Sans I/O."""

_THRESHOLD = 3
"""Consecutive failures that open the breaker."""
_FIRST_S = 1.0
_LONGEST_S = 60.0


class Breaker:
    """Breaker that opens after several failures in a row, for longer each time, and while a call hangs.

    Once its time is over one failure opens it again, and one success closes it.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._open_until_s = 0.0
        self._hangs = False
        self.num_opened = 0

    def is_open(self, now_s: float) -> bool:
        return self._hangs or now_s < self._open_until_s

    def note_hangs(self, *, hangs: bool) -> None:
        """Note whether there is a call that does not return."""
        self.num_opened += hangs and not self._hangs
        self._hangs = hangs

    def note(self, now_s: float, *, is_success: bool) -> None:
        """Note the outcome of an attempt."""
        if is_success:
            self._num_failures = 0
            self._open_until_s = 0.0
            return
        if now_s < self._open_until_s:
            return  # it was under way when another attempt opened the breaker
        self._num_failures += 1
        if self._num_failures >= _THRESHOLD and not self._hangs:
            wait_s = _FIRST_S * 2.0 ** min(self._num_failures - _THRESHOLD, 10)
            self._open_until_s = now_s + min(_LONGEST_S, wait_s)
            self.num_opened += 1
