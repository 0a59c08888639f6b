"""Things that a test knows to be of one kind, among others that they might be."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def all_of(kind: type[T], things: Iterable[object]) -> list[T]:
    """All of them; AssertionError if one is of another kind."""
    found = []
    for thing in things:
        assert isinstance(thing, kind), thing
        found.append(thing)
    return found
