"""Storage that never fails and takes long for everything that is asked of it, and the worker that uses it for files."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.spec.hicache_config import StorageBackendName, StorageConfig
from workers.hicache.storage import registry
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import Read, StorageObject
from workers.worker import Worker

DELAY_S = 2.0


class SlowStorage(FileStorage):
    """Only what is stored takes no longer than usual, so that there is something to ask for."""

    def count_leading(self, names: Sequence[str]) -> int:
        time.sleep(DELAY_S)
        return super().count_leading(names)

    def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
        time.sleep(DELAY_S)
        yield from super().read(objects)


def _slow(config: StorageConfig, host: str) -> SlowStorage:  # noqa: ARG001 - as every maker of a backend
    assert config.folder is not None
    return SlowStorage(Path(config.folder), 1 << 30, fsync=False)


class WorkerWithSlowStorage(Worker):
    """Its module, which only its process imports, puts the backend in place."""


registry.MAKERS[StorageBackendName.FILES] = _slow
