"""Storage that may be away, also when a worker starts: then it fails until it has come."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from cluster.spec.errors import UserError
from cluster.spec.tiers import StorageFigures
from workers.hicache.storage.interface import Read, StorageBackend, StorageError, StorageObject, Written

_log = logging.getLogger(__name__)

_FIRST_S = 5.0
"""Longest wait at the start for storage that is there; one that is away must not keep a replica from working."""


class AwaitedStorage:
    """Opens a backend on a thread of its own, since that may take minutes; the methods are those of ``StorageBackend``.

    Whoever needs storage which could not be opened starts the next try, so that the leader's breakers, which see the
    failures, say how often that is.
    """

    def __init__(self, open_storage: Callable[[], StorageBackend], first_s: float = _FIRST_S) -> None:
        """Try for the first time, and wait so long for it.

        Raises:
            UserError: what was asked for can never be.
        """
        self._open_storage = open_storage
        self._lock = threading.Lock()
        """Of all that follows."""
        self._backend: StorageBackend | None = None
        self._failure: Exception | None = None
        self._is_closed = False
        self._is_over = threading.Event()
        """The first attempt has succeeded, or failed."""
        self._attempt = self._start()
        self._is_over.wait(first_s)
        if isinstance(self._failure, UserError):
            raise self._failure
        if self._backend is None:
            _log.warning("the replica starts without storage: %s", self._failure or "it is still being opened")

    def count_leading(self, names: Sequence[str]) -> int:
        """Of the backend."""
        return self._opened().count_leading(names)

    def present(self, depths: Mapping[str, int]) -> list[str]:
        """Of the backend."""
        return self._opened().present(depths)

    def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
        """Of the backend."""
        return self._opened().read(objects)

    def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
        """Of the backend."""
        return self._opened().write(objects)

    def delete(self, name: str) -> None:
        """Of the backend."""
        self._opened().delete(name)

    def figures(self) -> StorageFigures | None:
        """Of the backend, if it is there."""
        backend = self._backend
        return backend.figures() if backend is not None else None

    def tidy(self) -> None:
        """Every backend is told to when it was opened."""

    def close(self) -> None:
        """Let go of the backend, or of the one that is still being opened as soon as it is there."""
        with self._lock:
            self._is_closed = True
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _opened(self) -> StorageBackend:
        with self._lock:
            if self._backend is not None:
                return self._backend
            if not self._attempt.is_alive() and not self._is_closed:
                self._attempt = self._start()
            raise StorageError(f"storage is not there: {self._failure or 'it is still being opened'}")

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._try, name="hicache-open", daemon=True)
        thread.start()
        return thread

    def _try(self) -> None:
        try:
            backend = self._open_storage()
        except Exception as error:  # whatever it is, who asks for storage must be told
            self._failure = error
            self._is_over.set()
            return
        with self._lock:
            is_wanted = not self._is_closed
            self._backend = backend if is_wanted else None
        self._is_over.set()
        if is_wanted:
            backend.tidy()
        else:
            backend.close()
