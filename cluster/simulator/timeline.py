"""Virtual time: events happen in the order of their times, and take none themselves."""

import heapq
from collections.abc import Callable
from itertools import count

Event = Callable[[], None]


class Timeline:
    """What will happen when; a ``Clock``."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def after(self, delay_s: float, event: Event) -> None:
        """Let something happen; of two at the same time, the one that was asked for first."""
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._numbers), event))

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._events:
            return False
        self._now_s, _, event = heapq.heappop(self._events)
        event()
        return True
