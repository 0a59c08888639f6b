"""Storage that is slow and fails at random, and the worker that uses it instead of files."""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.spec.hicache_config import StorageBackendName, StorageConfig
from tests.fakes.eager_worker import EagerWorker
from workers.hicache.storage import interface
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import Read, StorageError, StorageObject, Written

DELAY_S = 2.0


class FaultyStorage(FileStorage):
    """Every second call fails; of the others every second takes long."""

    _random = random.Random(1)

    def present(self, depths: Mapping[str, int]) -> list[str]:
        self._suffer()
        return super().present(depths)

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        return [self._suffered() or outcome for outcome in super().read(objects)]

    def write(self, objects: Sequence[StorageObject]) -> list[Written]:
        return [self._suffered() or outcome for outcome in super().write(objects)]

    def _suffered(self) -> StorageError | None:
        try:
            self._suffer()
        except StorageError as error:
            return error
        return None

    def _suffer(self) -> None:
        draw = self._random.random()
        if draw < 0.5:
            raise StorageError("storage fails at random")
        if draw < 0.75:
            time.sleep(DELAY_S)


def _faulty(config: StorageConfig, host: str) -> FaultyStorage:  # noqa: ARG001 - as every maker of a backend
    assert config.folder is not None
    return FaultyStorage(Path(config.folder), 1 << 30)


class WorkerWithFaultyStorage(EagerWorker):
    """Its module, which only its process imports, puts the backend in place."""


interface.MAKERS[StorageBackendName.FILES] = _faulty
