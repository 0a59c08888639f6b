"""Virtual time, and the trace of events in it: events run in the order of their times and take none."""

import heapq
from collections.abc import Callable
from itertools import count

from cluster.spec.messages import Message

Event = Callable[[], None]
_SHOWN = ("room", "generation", "sender_rank", "pages", "num_held_pages", "num_pages", "first_index", "state", "reason")


class Timeline:
    """Future events by time; a ``Clock``."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def now_s(self) -> float:
        return self._now_s

    def after(self, delay_s: float, event: Event) -> None:
        """Schedule an event; events at the same time run in the order of scheduling."""
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._numbers), event))

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._events:
            return False
        self._now_s, _, event = heapq.heappop(self._events)
        event()
        return True


class Trace:
    """Log of a run; costs next to nothing while it is off."""

    def __init__(self, timeline: Timeline, is_on: bool) -> None:
        self.lines: list[str] = []
        self._timeline = timeline
        self._is_on = is_on

    def add(self, *parts: object) -> None:
        """Add one line; its parts are formatted only if the trace is on."""
        if self._is_on:
            self.lines.append(f"{self._timeline.now_s():9.4f}  {' '.join(map(_in_words, parts))}")


def _in_words(part: object) -> str:
    if not isinstance(part, Message):
        return str(part)
    shown = [f"{name}={getattr(part, name)!s}" for name in _SHOWN if hasattr(part, name)]
    return f"{type(part).__name__}({', '.join(shown)})"
