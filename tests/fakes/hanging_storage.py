"""Storage whose reads hang while a file is there, and the worker that uses it instead of files."""

import time
from collections.abc import Sequence
from pathlib import Path

from cluster.spec.hicache_config import StorageBackendName, StorageConfig
from tests.fakes.eager_worker import EagerWorker
from workers.hicache.storage import interface
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import Read, StorageObject

HANGS = "hangs"
"""In the folder."""


class HangingStorage(FileStorage):
    """Nothing that is read comes while the file is there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30)
        self._hangs = folder / HANGS

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        while self._hangs.exists():
            time.sleep(0.01)
        return super().read(objects)


def _hanging(config: StorageConfig, host: str) -> HangingStorage:  # noqa: ARG001 - as every maker of a backend
    assert config.folder is not None
    return HangingStorage(Path(config.folder))


class WorkerWithHangingStorage(EagerWorker):
    """Its module, which only its process imports, puts the backend in place."""


interface.MAKERS[StorageBackendName.FILES] = _hanging
