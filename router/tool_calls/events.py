"""What a tool parser finds in a text, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of this function; what follows belongs to it until the next one."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The next part of the arguments, JSON, of the call that began last."""

    text: str


Event = Said | CallBegun | Argued


class ToolParser(Protocol):
    """Called with the text of one answer in pieces; how it is cut makes no difference."""

    def push(self, text: str) -> Sequence[Event]:
        """What this text completes. No part of a marker is ever said."""
        ...

    def flush(self) -> Sequence[Event]:
        """What is held back, now that nothing more comes."""
        ...
