"""Events of tool parsers, and the incremental reader of one call: a JSON object with name and arguments."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

_ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
"""Allowed members of a call."""


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of this function; what follows belongs to it until the next call."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The next part of the arguments, JSON, of the call that began last."""

    text: str


Event = Said | CallBegun | Argued


class ToolParser(Protocol):
    """Takes the text of one answer in arbitrary pieces."""

    def push(self, text: str) -> Sequence[Event]:
        """Return the events that this text completes. No part of a marker is ever said."""

    def flush(self) -> Sequence[Event]:
        """Return the events held back."""


class CallScanner:
    """Follows the object character by character; values are taken as they are written."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """``names`` are the known functions: an object that calls another, or has unknown members, is no call."""
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._written = ""
        self._values: dict[str, str] = {}
        self._num_passed = 0
        """Characters of the arguments that were passed on."""
        self.raw = ""
        self.has_begun = False
        """True once it is known to be a call."""
        self.is_over = False
        """True if the object is complete, or is no call."""

    def push(self, text: str) -> tuple[list[Event], str]:
        """Return the events that this text completes, and its part that was not taken."""
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
        """End a key or a value of the object."""
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
        """Return the new part of the arguments; a call without any has none."""
        known = next((self._values[key] for key in _ARGUMENTS if key in self._values), None)
        if known is None:
            known = self._written.strip() if self._key in _ARGUMENTS else "{}" if self.is_over else ""
        new, self._num_passed = known[self._num_passed :], max(self._num_passed, len(known))
        return [Argued(new)] if new else []


def _string(written: str) -> str | None:
    """Return the string that this JSON denotes; None if it is no string."""
    try:
        value = json.loads(written)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
