"""Interface of storage backends, which keep named objects and do not know pages, keys or ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.spec.errors import BatonError
from cluster.spec.tiers import StorageFigures


class StorageError(BatonError):
    """Error of a storage operation that may succeed later."""


class CorruptObjectError(BatonError):
    """Error of an object whose content is not what was written under its name."""


@dataclass(frozen=True, slots=True)
class StorageObject:
    """Name of an object, and the memory its bytes are read into or written from, one part after another."""

    name: str
    parts: Sequence[memoryview]
    depth: int = 0
    """Number of objects that this one needs: a page needs the pages before it in its prompt."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))


Read = bool | CorruptObjectError | StorageError
"""Outcome of reading an object: true if it was read, false if there is no such object, or an error."""
Written = StorageError | None
"""Outcome of writing an object: an error, or None on success."""


class StorageBackend(Protocol):
    """Objects by name: letters, digits, dots and dashes, in folders divided by slashes. Objects never change.

    Several threads, and several processes on the same storage, may call all methods at once; the names of one call
    differ. An object is either complete or absent, whatever happens to its writer. Every method raises ``StorageError``
    if storage cannot answer.
    """

    def present(self, depths: Mapping[str, int]) -> list[str]:
        """Return which of these objects are there, and count them as used where storage evicts by use.

        ``depths`` maps names to ``StorageObject.depth``.
        """
        ...

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        """Fill the parts of objects; return an outcome for each. An object of another size is corrupt."""
        ...

    def write(self, objects: Sequence[StorageObject]) -> list[Written]:
        """Write objects in the form that ``read`` reads; one that exists may be kept or replaced by its equal."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        ...

    def figures(self) -> StorageFigures | None:
        """Return what this process knows about storage as a whole, without a request to it; None if nothing."""
        ...

    def close(self) -> None:
        """Release everything; safe to call twice."""
        ...
