"""Journal of the pages that entered and left a prefix tree since it was last read."""


class PageJournal:
    """Net changes by page key: a page that came and went is no change, so the journal never holds more keys than were
    moved.
    """

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}

    def note(self, key: bytes, is_stored: bool) -> None:
        """Record that a page was stored or removed."""
        if self._changes.pop(key, is_stored) is is_stored:
            self._changes[key] = is_stored

    @property
    def has_changes(self) -> bool:
        """Return whether there are changes to take."""
        return bool(self._changes)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys stored and those removed since the last call."""
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return stored, [key for key, is_stored in changes.items() if not is_stored]
