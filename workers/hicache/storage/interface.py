"""The interface of storage backends, which keep named objects and know nothing of pages, keys or ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.spec.errors import BatonError
from cluster.spec.tiers import StorageFigures


class StorageError(BatonError):
    """Storage cannot do what it was asked to do now; it may later."""


class CorruptObjectError(BatonError):
    """An object is not what was written under its name, and never will be."""


@dataclass(frozen=True, slots=True)
class StorageObject:
    """A name, and the memory that its bytes come from or go to, one part after another."""

    name: str
    parts: Sequence[memoryview]
    depth: int = 0
    """Objects without which this one is useless: a page needs the pages before it in its prompt."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))


Read = bool | CorruptObjectError | StorageError
"""Outcome of reading an object: true if its bytes are there, false if there is no such object, or an error."""
Written = StorageError | None
"""Outcome of writing an object: an error, or none."""


class StorageBackend(Protocol):
    """Objects by name: letters, digits, dots and dashes, in folders divided by slashes. Objects never change.

    Several threads, and several processes on the same storage, may call all methods at once; the names of one call
    differ. An object is there whole or not at all, whatever happens to its writer.
    """

    def count_leading(self, names: Sequence[str]) -> int:
        """Return how many objects are there before the first that is not.

        Raises:
            StorageError: storage cannot say.
        """
        ...

    def present(self, depths: Mapping[str, int]) -> list[str]:
        """Return which of these objects are there, and count them as used where storage evicts by use.

        ``depths`` maps names to ``StorageObject.depth``.

        Raises:
            StorageError: storage cannot say.
        """
        ...

    def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
        """Fill the parts of objects; yield an outcome for each, in order.

        An object may be read no sooner than its outcome is taken, so a caller that runs out of time takes no more
        outcomes. An object of another size is corrupt.

        Raises:
            StorageError: the rest cannot be read.
        """
        ...

    def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
        """Keep objects, as ``read`` reads them; one that is there already counts as used and stays as it is.

        Raises:
            StorageError: the rest cannot be written.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove an object, if it is there.

        Raises:
            StorageError: the object cannot be deleted.
        """
        ...

    def figures(self) -> StorageFigures | None:
        """Return what this process knows of storage as a whole, without asking it; None for nothing."""
        ...

    def maintain(self) -> None:
        """Do upkeep until closed; called once, on a thread of its own."""
        ...

    def close(self) -> None:
        """Release everything; safe to call twice."""
        ...
