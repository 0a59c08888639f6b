"""A set of page keys that grows without a pause."""

from collections.abc import Iterable, Iterator, Set

_SHARES = (6, 7, 8, 9, 10) * 6 + (6, 10)
"""First bytes of each part, 256 together. They differ so that the parts do not grow all at once."""


class KeySet(Set[bytes]):
    """Many small dicts, by the first byte of each key, as keys are hashes.

    A set that grows is copied whole once in a while: with a million keys that takes 150 ms, while every stream waits.
    And the garbage collector goes through all that is in a set, which takes 50 ms, but not through a dict of bytes.
    """

    __slots__ = ("_part_of", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[bytes, None]] = [{} for _ in _SHARES]
        self._part_of = [part for part, share in zip(self._parts, _SHARES, strict=True) for _ in range(share)]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._part_of[key[0]]

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield from part

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add_all(self, keys: Iterable[bytes]) -> int:
        """How many of them are new."""
        before, part_of = len(self), self._part_of
        for key in keys:
            part_of[key[0]][key] = None
        return len(self) - before

    def remove_all(self, keys: Iterable[bytes]) -> int:
        """How many of them were there."""
        before, part_of = len(self), self._part_of
        for key in keys:
            part_of[key[0]].pop(key, None)
        return before - len(self)

    def clear(self) -> int:
        """How many there were."""
        num_keys = len(self)
        for part in self._parts:
            part.clear()
        return num_keys
