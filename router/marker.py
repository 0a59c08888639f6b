"""Find a marker, and hold white space back, in text that arrives in arbitrary pieces."""


class MarkerScanner:
    """Passes text on up to the first of some markers."""

    def __init__(self, *markers: str) -> None:
        assert all(markers), "an empty marker is everywhere"
        self._markers = markers
        self._held = ""
        """Text that may begin a marker."""
        self.hit: str | None = None
        """The marker that came last."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text before the first marker, and the text after it; None until one has come."""
        if not self._markers:
            return text, None
        held = self._held + text
        found = [(start + len(marker), start, marker) for marker in self._markers if (start := held.find(marker)) >= 0]
        if found:
            end, start, self.hit = min(found)
            self._held = ""
            return held[:start], held[end:]
        end = len(held) - self._num_suspect(held)
        self._held = held[end:]
        return held[:end], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_suspect(self, text: str) -> int:
        """Return the length of the longest ending that begins a marker."""
        longest = min(len(text), max(map(len, self._markers)) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(marker.startswith(text[-n:]) for marker in self._markers)), 0)


class Trimmer:
    """Drops the white space at the beginning of a text, and holds back that at its end."""

    def __init__(self, *, keeps_start: bool = False) -> None:
        self._begun = keeps_start
        self._held = ""

    def push(self, text: str) -> str:
        """Return what is certainly not at the end."""
        self._held += text
        if not self._begun:
            self._held = self._held.lstrip()
        end = len(self._held.rstrip())
        self._begun = self._begun or end > 0
        through, self._held = self._held[:end], self._held[end:]
        return through

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
