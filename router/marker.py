"""Finding a marker, and holding white space back, in text that comes in pieces cut anywhere."""


class MarkerScanner:
    """Lets text through up to a marker."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self._held = ""
        """Text that may be the beginning of the marker."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text before the marker, and what follows the marker; None as long as it has not come."""
        self._held += text
        before, found, after = self._held.partition(self.marker)
        if found:
            self._held = ""
            return before, after
        suspect = next(n for n in range(len(self.marker), -1, -1) if before.endswith(self.marker[:n]))
        self._held = before[len(before) - suspect :]
        return before[: len(before) - suspect], None

    def flush(self) -> str:
        """What is held back, now that nothing can complete the marker."""
        held, self._held = self._held, ""
        return held


class Trimmer:
    """Lets text through without the white space at its beginning, and holds back that at its end."""

    def __init__(self, *, keeps_start: bool = False) -> None:
        self._begun = keeps_start
        self._held = ""

    def push(self, text: str) -> str:
        """What is surely not at the end."""
        self._held += text
        if not self._begun:
            self._held = self._held.lstrip()
        end = len(self._held.rstrip())
        self._begun = self._begun or end > 0
        through, self._held = self._held[:end], self._held[end:]
        return through

    def flush(self) -> str:
        """The white space at the end."""
        held, self._held = self._held, ""
        return held
