"""Storage that may be unavailable, also when a worker starts; calls fail until it can be opened."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from cluster.spec.errors import UserError
from cluster.spec.tiers import StorageFigures
from workers.hicache.storage.interface import Read, StorageBackend, StorageError, StorageObject, Written

_log = logging.getLogger(__name__)

_FIRST_S = 5.0
"""Longest wait for storage when a worker starts; a replica works without it."""


class OpeningStorage:
    """Wrapper that opens another ``StorageBackend`` on its own thread, since that may take minutes.

    A call that finds storage closed starts the next attempt, so the leader's breakers set the pace.
    """

    def __init__(self, open_storage: Callable[[], StorageBackend], first_s: float = _FIRST_S) -> None:
        """Start the first attempt, and wait for it for up to ``first_s``.

        Raises:
            UserError: the configuration is wrong.
        """
        self._open_storage = open_storage
        self._lock = threading.Lock()
        """Lock of the fields below."""
        self._backend: StorageBackend | None = None
        self._failure: Exception | None = None
        self._is_closed = False
        self._first_attempt_over = threading.Event()
        self._attempt = self._start()
        self._first_attempt_over.wait(first_s)
        if isinstance(self._failure, UserError):
            raise self._failure
        if self._backend is None:
            _log.warning("starting without storage: %s", self._reason)

    def count_leading(self, names: Sequence[str]) -> int:
        return self._opened().count_leading(names)

    def present(self, depths: Mapping[str, int]) -> list[str]:
        return self._opened().present(depths)

    def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
        return self._opened().read(objects)

    def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
        return self._opened().write(objects)

    def delete(self, name: str) -> None:
        self._opened().delete(name)

    def figures(self) -> StorageFigures | None:
        backend = self._backend
        return backend.figures() if backend is not None else None

    def maintain(self) -> None:
        """Do nothing: each backend is maintained by the thread that opened it."""

    def close(self) -> None:
        """Close the backend; one that is still being opened is closed as soon as it is open."""
        with self._lock:
            self._is_closed = True
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    @property
    def _reason(self) -> object:
        return self._failure or "it is still being opened"

    def _opened(self) -> StorageBackend:
        with self._lock:
            if self._backend is not None:
                return self._backend
            if not self._attempt.is_alive() and not self._is_closed:
                self._attempt = self._start()
            raise StorageError(f"storage is unavailable: {self._reason}")

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._try, name="hicache-open", daemon=True)
        thread.start()
        return thread

    def _try(self) -> None:
        try:
            backend = self._open_storage()
        except Exception as error:  # whatever it is, callers must learn of it
            self._failure = error
            self._first_attempt_over.set()
            return
        with self._lock:
            is_wanted = not self._is_closed
            self._backend = backend if is_wanted else None
        self._first_attempt_over.set()
        if is_wanted:
            backend.maintain()
        else:
            backend.close()
