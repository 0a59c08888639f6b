"""What every storage backend does. Backends keep named objects; they know no pages, keys or ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.spec.errors import BatonError
from cluster.spec.tiers import StorageFigures


class StorageError(BatonError):
    """Storage did not do what it was asked; it may do so later."""


class CorruptObjectError(BatonError):
    """An object is there, and is not what was written under its name."""


@dataclass(frozen=True, slots=True)
class StorageObject:
    """A name, and the memory in which its bytes are, or into which they go, one part after another."""

    name: str
    parts: Sequence[memoryview]
    depth: int = 0
    """Objects without which this one is of no use; of a prompt's pages, those before it."""

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return sum(map(len, self.parts))


Read = bool | CorruptObjectError | StorageError
"""What came of reading an object: its bytes, nothing since there is none, or why not."""
Written = StorageError | None
"""What came of writing an object: none for success."""


class StorageBackend(Protocol):
    """Objects by name (letters, digits, dots and dashes, folders divided by a slash). A name's bytes never change.

    Several threads, and several processes on the same storage, may call everything at once; the names of one call
    differ. An object is there whole or not at all, whatever happens to whoever writes it.
    """

    def count_leading(self, names: Sequence[str]) -> int:
        """How many objects are there before the first that is not.

        Raises:
            StorageError: storage cannot tell.
        """
        ...

    def present(self, depths: Mapping[str, int]) -> list[str]:
        """Those of these objects that are there, which counts as using them where storage gives up what is not used.

        ``depths`` are those of ``StorageObject``, by name.

        Raises:
            StorageError: storage cannot tell.
        """
        ...

    def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
        """Fill the parts of objects with their bytes; what came of each, in order.

        An object may be read no sooner than its turn comes, so whoever has no more time takes no more results. A
        corrupt object is one of another size.

        Raises:
            StorageError: the rest cannot be read.
        """
        ...

    def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
        """Keep the bytes of all parts under their names, as ``read`` reads them.

        Where there is such an object already it counts as used, and nothing else happens.

        Raises:
            StorageError: the rest cannot be written.
        """
        ...

    def delete(self, name: str) -> None:
        """Forget an object, if it is there.

        Raises:
            StorageError: it cannot be deleted.
        """
        ...

    def figures(self) -> StorageFigures | None:
        """What this process knows of storage as a whole, without asking it; None for nothing."""
        ...

    def tidy(self) -> None:
        """Do what may take long and nobody waits for; called once after opening, on a thread of its own."""
        ...

    def close(self) -> None:
        """Let go of everything; safe to call twice."""
        ...


def write_one(backend: StorageBackend, name: str, parts: Sequence[memoryview]) -> None:
    """Keep the bytes of one object.

    Raises:
        StorageError: it cannot be written.
    """
    (error,) = backend.write([StorageObject(name, parts)])
    if error is not None:
        raise error
