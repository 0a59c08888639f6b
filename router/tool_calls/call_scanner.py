"""One call, a JSON object with the name of a function and its arguments, read while it comes."""

import json
from collections.abc import Collection

from router.tool_calls.events import Argued, CallBegun, Event

_ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
"""Members that a call may have."""


class CallScanner:
    """Follows the object character by character; its members' values are taken as they are written."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """With ``names``, an object that calls none of them, or has other members than calls have, is no call."""
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._written = ""
        """Of the member's key or value at hand."""
        self._values: dict[str, str] = {}
        self._num_told = 0
        """Characters of the arguments that were told."""
        self.raw = ""
        """All that was taken."""
        self.has_begun = False
        """It is a call."""
        self.is_over = False
        """Nothing more is taken: the object is whole, or it is none."""

    def push(self, text: str) -> tuple[list[Event], str]:
        """What this text completes, and the part of it that was not taken."""
        events: list[Event] = []
        num_taken = 0
        while num_taken < len(text) and not self.is_over:
            self._take(text[num_taken], events)
            num_taken += 1
        self.raw += text[:num_taken]
        if self.has_begun:
            events += self._argue()
        return events, text[num_taken:]

    def _take(self, char: str, events: list[Event]) -> None:
        if self._in_string:
            self._written += char
            self._in_string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        elif self._depth == 0:
            self._depth = 1
            self.is_over = char != "{"
        elif self._depth == 1 and char in ":,}":
            self._divide(char, events)
        else:
            self._in_string = char == '"'
            self._depth = max(1, self._depth + (char in "{[") - (char in "}]"))
            self._written += char

    def _divide(self, char: str, events: list[Event]) -> None:
        """A key or a value of the object is whole."""
        written, self._written = self._written.strip(), ""
        if char == ":":
            key = _string(written)
            is_known = self._names is None or key in KEYS
            self.is_over = key is None or self._key is not None or not is_known
            self._key = key
            return
        if self._key is None:
            self.is_over = bool(written) or char == "}"
            return
        self._values[self._key] = written
        if self._key == "name" and not self.has_begun:
            self._begin(written, events)
        self._key = None
        self.is_over = self.is_over or char == "}"

    def _begin(self, written: str, events: list[Event]) -> None:
        name = _string(written)
        if not name or (self._names is not None and name not in self._names):
            self.is_over = True
        else:
            self.has_begun = True
            events.append(CallBegun(name))

    def _argue(self) -> list[Event]:
        """The arguments as far as they are new; a call without any has none."""
        known = next((self._values[key] for key in _ARGUMENTS if key in self._values), None)
        if known is None:
            known = self._written.strip() if self._key in _ARGUMENTS else "{}" if self.is_over else ""
        new, self._num_told = known[self._num_told :], max(self._num_told, len(known))
        return [Argued(new)] if new else []


def _string(written: str) -> str | None:
    """The string that this JSON writes; None if it writes none."""
    try:
        value = json.loads(written)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
