"""Leaves a failing backend alone for a while, longer each time, and one that hangs until it comes back. Sans I/O."""

_THRESHOLD = 3
"""Failures in a row that open it."""
_FIRST_S = 1.0
_LONGEST_S = 60.0


class Breaker:
    """Open after several failures in a row; then one failed attempt opens it anew, and a success closes it."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._open_until_s = 0.0
        self._hangs = False
        self.num_opened = 0

    def is_open(self, now_s: float) -> bool:
        """Whether the backend is to be left alone."""
        return self._hangs or now_s < self._open_until_s

    def note_hangs(self, *, hangs: bool) -> None:
        """Whether there is an attempt that the backend does not come back from."""
        self.num_opened += hangs and not self._hangs
        self._hangs = hangs

    def note(self, now_s: float, *, is_success: bool) -> None:
        """An attempt is over."""
        if is_success:
            self._num_failures = 0
            self._open_until_s = 0.0
            return
        if now_s < self._open_until_s:
            return  # it was under way when another opened it
        self._num_failures += 1
        if self._num_failures >= _THRESHOLD and not self._hangs:
            wait_s = _FIRST_S * 2.0 ** min(self._num_failures - _THRESHOLD, 10)
            self._open_until_s = now_s + min(_LONGEST_S, wait_s)
            self.num_opened += 1
