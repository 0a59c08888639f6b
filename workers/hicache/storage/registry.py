"""Storage backends by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.spec.env import CACHE_DIR
from cluster.spec.errors import UserError
from cluster.spec.hicache_config import StorageBackendName, StorageConfig
from workers.hicache.storage.interface import StorageBackend
from workers.hicache.storage.opening import OpeningStorage


def make_storage(config: StorageConfig, host: str) -> StorageBackend | None:
    """Return the configured backend, if there is one; ``host`` is the address at which peers reach this process.

    Raises:
        UserError: the configuration is wrong. Storage that is unavailable is not an error here.
    """
    maker = MAKERS.get(config.backend)
    return OpeningStorage(partial(maker, config, host)) if maker else None


def _files(config: StorageConfig, host: str) -> StorageBackend:  # noqa: ARG001 - a folder is the same for all
    from workers.hicache.storage.files import FileStorage

    folder = Path(config.folder).expanduser() if config.folder else CACHE_DIR.get() / "hicache"
    storage = FileStorage(folder, int(config.max_gib * (1 << 30)))
    storage.start_sweeper()
    return storage


def _mooncake_store(config: StorageConfig, host: str) -> StorageBackend:
    try:
        from workers.hicache.storage.mooncake_store import MooncakeStorage
    except ImportError as error:
        raise UserError(
            f"hicache.storage.backend: mooncake_store cannot be loaded ({error}); it needs the Python package "
            "mooncake-transfer-engine-non-cuda and the Debian packages libibverbs1 librdmacm1 libnuma1"
        ) from error
    return MooncakeStorage(host, config.master, int(config.lent_gib * (1 << 30)))


MAKERS: dict[StorageBackendName, Callable[[StorageConfig, str], StorageBackend]] = {
    StorageBackendName.FILES: _files,
    StorageBackendName.MOONCAKE_STORE: _mooncake_store,
}
