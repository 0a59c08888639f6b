"""Find a marker, and hold white space back, in text that arrives in arbitrary pieces."""


class MarkerScanner:
    """Passes text on up to a marker."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self._held = ""
        """Text that may begin the marker."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text before the marker, and the text after it; None until it has come."""
        self._held += text
        before, found, after = self._held.partition(self.marker)
        if found:
            self._held = ""
            return before, after
        suspect = next(n for n in range(len(self.marker), -1, -1) if before.endswith(self.marker[:n]))
        self._held = before[len(before) - suspect :]
        return before[: len(before) - suspect], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


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
