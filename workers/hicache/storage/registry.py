"""Storage backends by name."""

from collections.abc import Callable
from pathlib import Path

from cluster.spec.config import StorageBackendName, StorageConfig
from cluster.spec.env import CACHE_DIR
from workers.hicache.storage.interface import StorageBackend


def make_storage(config: StorageConfig) -> StorageBackend | None:
    """The backend that a configuration names, if it names one.

    Raises:
        UserError: what it needs is not there.
    """
    maker = MAKERS.get(config.backend)
    return maker(config) if maker else None


def _files(config: StorageConfig) -> StorageBackend:
    from workers.hicache.storage.files import FileStorage

    folder = Path(config.folder).expanduser() if config.folder else CACHE_DIR.get() / "hicache"
    return FileStorage(folder, int(config.max_gib * (1 << 30)), fsync=config.fsync)


MAKERS: dict[StorageBackendName, Callable[[StorageConfig], StorageBackend]] = {StorageBackendName.FILES: _files}
