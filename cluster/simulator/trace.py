"""What happened in one simulation, line by line."""

from cluster.simulator.timeline import Timeline
from cluster.spec.messages import Message

_SHOWN = ("room", "generation", "sender_rank", "pages", "held_pages", "num_pages", "first_index", "state", "reason")


class Trace:
    """Collects lines; costs next to nothing while it is off."""

    def __init__(self, timeline: Timeline, is_on: bool) -> None:
        self.lines: list[str] = []
        self._timeline = timeline
        self._is_on = is_on

    def add(self, *parts: object) -> None:
        """One line of parts, which are put into words only if somebody wants them."""
        if self._is_on:
            self.lines.append(f"{self._timeline.now_s():9.4f}  {' '.join(map(_in_words, parts))}")


def _in_words(part: object) -> str:
    if not isinstance(part, Message):
        return str(part)
    shown = [f"{name}={getattr(part, name)!s}" for name in _SHOWN if hasattr(part, name)]
    return f"{type(part).__name__}({', '.join(shown)})"
