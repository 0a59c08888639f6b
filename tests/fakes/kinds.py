"""Type checks for tests that know the one kind in a list of several."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def all_of(kind: type[T], things: Iterable[object]) -> list[T]:
    """Return all things. Raise AssertionError if one is of another kind."""
    found = []
    for thing in things:
        assert isinstance(thing, kind), thing
        found.append(thing)
    return found
