"""What every storage backend does. Backends keep named objects; they know no pages, keys or ranks."""

from collections.abc import Sequence
from typing import Protocol

from cluster.spec.errors import BatonError
from cluster.spec.tiers import StorageFigures


class StorageError(BatonError):
    """Storage did not do what it was asked; it may do so later."""


class CorruptObjectError(BatonError):
    """An object is there, and is not what was written under its name."""


class StorageBackend(Protocol):
    """Objects by name (letters, digits, dots and dashes, folders divided by a slash). A name's bytes never change.

    Several threads, and several processes on the same storage, may call everything at once. An object is there whole
    or not at all, whatever happens to whoever writes it.
    """

    def count_leading(self, names: Sequence[str]) -> int:
        """How many objects are there before the first that is not.

        Raises:
            StorageError: storage cannot tell.
        """
        ...

    def present(self, names: Sequence[str]) -> list[str]:
        """Those of these objects that are there.

        Raises:
            StorageError: storage cannot tell.
        """
        ...

    def read(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Fill the parts, one after another, with the bytes of an object; false if there is none.

        Raises:
            CorruptObjectError: the object has another size.
            StorageError: it cannot be read.
        """
        ...

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """Keep the bytes of all parts under a name; nothing happens if there is such an object already.

        Raises:
            StorageError: it cannot be written.
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

    def close(self) -> None:
        """Let go of everything; safe to call twice."""
        ...
