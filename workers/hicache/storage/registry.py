"""Factory of storage backends, which are opened on a separate thread."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

from cluster.spec.env import CACHE_DIR
from cluster.spec.errors import UserError
from cluster.spec.hicache_config import StorageBackendName, StorageConfig
from cluster.spec.tiers import StorageFigures
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import NO_KEY, Read, StorageBackend, StorageError, StorageObject, Written
from workers.hicache.storage.private_folder import PrivateFolder

_log = logging.getLogger(__name__)

_FIRST_S = 5.0
"""Maximum wait for storage when a worker starts. A replica also works without storage."""


def make_storage(config: StorageConfig, host: str) -> StorageBackend | None:
    """Return the configured backend, or None. ``host`` is this process's address for peers.

    Raises:
        UserError: the configuration is wrong. Unavailable storage is not an error.
    """
    maker = MAKERS.get(config.backend)
    return OpeningStorage(partial(maker, config, host)) if maker else None


class OpeningStorage:
    """Storage backend that opens another one on a separate thread, which may take minutes. Until then, calls fail.

    A call after a failed attempt starts a new attempt, so the leader's breaker limits the rate of attempts.
    """

    def __init__(self, open_storage: Callable[[], StorageBackend]) -> None:
        """Start the first attempt, and wait a few seconds for it.

        Raises:
            UserError: the configuration is wrong.
        """
        self._open_storage = open_storage
        self._lock = threading.Lock()
        """Lock that guards the fields below."""
        self._is_closed = False
        self._attempt = self._start()
        wait([self._attempt], _FIRST_S)
        error = self._attempt.exception() if self._attempt.done() else "it is still being opened"
        if isinstance(error, UserError):
            raise error
        if error is not None:
            _log.warning("starting without storage: %s", error)

    @property
    def key(self) -> bytes:
        return self._opened().key

    def present(self, depths: Mapping[str, int]) -> list[str]:
        return self._opened().present(depths)

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        return self._opened().read(objects)

    def write(self, objects: Sequence[StorageObject]) -> list[Written]:
        return self._opened().write(objects)

    def delete(self, name: str) -> None:
        self._opened().delete(name)

    def figures(self) -> StorageFigures | None:
        attempt = self._attempt  # another thread may start a new attempt at any time
        is_open = attempt.done() and attempt.exception() is None
        return attempt.result().figures() if is_open else None

    def close(self) -> None:
        """Close the backend once it is open."""
        with self._lock:
            self._is_closed = True
        self._attempt.add_done_callback(_close)

    def _opened(self) -> StorageBackend:
        with self._lock:
            if self._is_closed:
                raise StorageError("storage is closed")
            if not self._attempt.done():
                raise StorageError("storage is still being opened")
            error = self._attempt.exception()
            if error is None:
                return self._attempt.result()
            self._attempt = self._start()
        raise StorageError(f"storage is unavailable: {error}") from error

    def _start(self) -> Future[StorageBackend]:
        attempt = Future[StorageBackend]()
        threading.Thread(target=self._try, args=(attempt,), name="hicache-open", daemon=True).start()
        return attempt

    def _try(self, attempt: Future[StorageBackend]) -> None:
        try:
            attempt.set_result(self._open_storage())
        except Exception as error:  # raised by the next call
            attempt.set_exception(error)


def _close(attempt: Future[StorageBackend]) -> None:
    if attempt.exception() is None:
        attempt.result().close()


def _files(config: StorageConfig, host: str) -> StorageBackend:  # noqa: ARG001 - a folder has no address
    storage = FileStorage(_folder(config) or CACHE_DIR.get() / "hicache", int(config.max_gib * (1 << 30)))
    storage.start_sweeper()
    return storage


def _mooncake_store(config: StorageConfig, host: str) -> StorageBackend:
    try:
        from workers.hicache.storage.mooncake_store import MooncakeStorage
    except ImportError as error:
        what = f"hicache.storage.backend: mooncake_store cannot be loaded ({error})"
        raise UserError(f"{what}; `baton doctor` shows what is missing") from error
    folder = _folder(config)
    return MooncakeStorage(host, config.master, key=PrivateFolder(folder).key if folder else NO_KEY)


def _folder(config: StorageConfig) -> Path | None:
    return Path(config.folder).expanduser() if config.folder else None


MAKERS: dict[StorageBackendName, Callable[[StorageConfig, str], StorageBackend]] = {
    StorageBackendName.FILES: _files,
    StorageBackendName.MOONCAKE_STORE: _mooncake_store,
}
