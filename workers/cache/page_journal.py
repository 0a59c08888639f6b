"""What has come into a prefix tree and gone out of it since somebody looked."""


class PageJournal:
    """Net changes by page key: what came and went again is no change, so it never holds more keys than were moved."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}

    def note(self, key: bytes, is_stored: bool) -> None:
        """A page was stored, or removed."""
        if self._changes.pop(key, is_stored) is is_stored:
            self._changes[key] = is_stored

    @property
    def has_changes(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._changes)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """The keys stored and those removed since the last call."""
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return stored, [key for key, is_stored in changes.items() if not is_stored]
