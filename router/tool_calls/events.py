"""Events that a tool parser finds in a text, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
        ...

    def flush(self) -> Sequence[Event]:
        """Return the events held back."""
        ...
