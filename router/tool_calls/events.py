"""Events of an answer with tool calls, and the interface of parsers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Beginning of a call to a function. Later arguments belong to it."""

    name: str
    id: str = ""
    """Id that the model gives the call; empty in most formats."""


@dataclass(frozen=True, slots=True)
class Argued:
    """Next part of the latest call's arguments, in JSON."""

    text: str


Event = Said | CallBegun | Argued


class ToolParser(Protocol):
    """Parses one answer's text, given in arbitrary pieces."""

    def push(self, text: str) -> Sequence[Event]:
        """Return the events that this text completes. Parts of markers are never passed on as text."""

    def flush(self) -> Sequence[Event]:
        """Return the events of the held-back text, at the end of the answer."""
