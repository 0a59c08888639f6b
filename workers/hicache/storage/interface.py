"""Interface of storage backends. A backend keeps named objects and knows nothing about pages or ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.spec.errors import BatonError
from cluster.spec.tiers import StorageFigures

NO_KEY = bytes(32)
"""Key of storage whose contents are checked for accidents only."""


class StorageError(BatonError):
    """Storage error that might not recur when the operation is retried."""


class CorruptObjectError(BatonError):
    """Object whose content differs from what was written under its name."""


@dataclass(frozen=True, slots=True)
class StorageObject:
    """Name of an object, and the memory that holds its parts for a read or a write."""

    name: str
    parts: Sequence[memoryview]
    depth: int = 0
    """Number of other objects that this one depends on, such as earlier pages of a prompt."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))


Read = bool | CorruptObjectError | StorageError
"""Outcome of reading an object: True if it was read, False if it does not exist, or an error."""
Written = StorageError | None
"""Outcome of writing an object: an error, or None on success."""


class StorageBackend(Protocol):
    """Store of named, immutable objects. Names contain letters, digits, dots and dashes; slashes separate folders.

    Threads and processes that share the storage may call all methods concurrently. The names in one call must differ.
    An object is either complete or absent, even if its writer dies. Every method raises ``StorageError`` if storage
    does not respond.
    """

    @property
    def key(self) -> bytes:
        """Secret of 32 bytes that authenticates names and contents, the same for all processes; ``NO_KEY`` if none."""
        ...

    def present(self, depths: Mapping[str, int]) -> list[str]:
        """Return the names of objects that exist. Mark these objects as used if storage evicts by last use.

        ``depths`` maps names to ``StorageObject.depth``.
        """
        ...

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        """Read objects into their parts. Return an outcome per object. An object of the wrong size is corrupt."""
        ...

    def write(self, objects: Sequence[StorageObject]) -> list[Written]:
        """Write objects. Return an outcome per object. An existing object may be kept or replaced by an equal one."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        ...

    def figures(self) -> StorageFigures | None:
        """Return what this process knows about the storage, without querying it. None if nothing is known."""
        ...

    def close(self) -> None:
        """Release all resources. Safe to call twice."""
        ...
