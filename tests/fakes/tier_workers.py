"""Workers with different tiers, storage or pools, each class in its own processes."""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cluster.spec.config import TransferBackendName, TransferProtocol
from cluster.spec.hicache_config import StorageBackendName, StorageConfig
from transfer.backends.interface import TransferBackend
from transfer.backends.registry import make_backend
from workers import rank
from workers.hicache.storage import registry
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import Read, StorageError, StorageObject, Written
from workers.memory.peer_memory import open_apart
from workers.worker import Worker

DELAY_S = 2.0
HANGS = "hangs"
"""Name of a file that makes storage hang while it exists."""


class EagerWorker(Worker):
    """Worker that fetches stored pages even for short prompts, as in most tests."""

    def __init__(self, *args: Any) -> None:
        patch("workers.hicache.policy.prefetcher.MIN_TOKENS", 1).start()
        super().__init__(*args)


class FaultyStorage(FileStorage):
    """Storage that fails every second call and delays half of the others."""

    _random = random.Random(1)

    def present(self, depths: Mapping[str, int]) -> list[str]:
        if (error := self._error()) is not None:
            raise error
        return super().present(depths)

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        return [self._error() or outcome for outcome in super().read(objects)]

    def write(self, objects: Sequence[StorageObject]) -> list[Written]:
        return [self._error() or outcome for outcome in super().write(objects)]

    def _error(self) -> StorageError | None:
        draw = self._random.random()
        if draw < 0.5:
            return StorageError("storage fails at random")
        if draw < 0.75:
            time.sleep(DELAY_S)
        return None


class HangingStorage(FileStorage):
    """Storage whose reads hang while a file named HANGS exists."""

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        while (self._folder.path / HANGS).exists():
            time.sleep(0.01)
        return super().read(objects)


class WorkerWithFaultyStorage(EagerWorker):
    """Worker whose file storage is slow and fails at random."""

    def __init__(self, *args: Any) -> None:
        _store_with(FaultyStorage)
        super().__init__(*args)


class WorkerWithHangingStorage(EagerWorker):
    """Worker whose file storage may hang."""

    def __init__(self, *args: Any) -> None:
        _store_with(HangingStorage)
        super().__init__(*args)


def _store_with(storage: type[FileStorage]) -> None:
    def make(config: StorageConfig, host: str) -> FileStorage:  # noqa: ARG001 - as every maker of a backend
        assert config.folder is not None
        return storage(Path(config.folder), 1 << 30)

    registry.MAKERS[StorageBackendName.FILES] = make


class WorkerWithStagedPool(EagerWorker):
    """Worker whose pool is separate from the memory that peers reach, as on a GPU."""

    def __init__(self, *args: Any) -> None:
        patch.object(rank, "open_peer_memory", open_apart).start()
        super().__init__(*args)


class WorkerWithRegisteredPool(WorkerWithStagedPool):
    """Worker whose pool was not allocated by the transfer backend, as on a GPU with RDMA.

    Mooncake moves the bytes over TCP, which works because the pool is in host memory.
    """

    def __init__(self, *args: Any) -> None:
        patch.object(rank, "make_backend", _make_backend).start()
        super().__init__(*args)

    def load(self, store_address: str) -> Any:
        record = super().load(store_address)
        assert self._rank is not None
        assert self._rank.memory.host is None, "pages are copied"
        assert record.endpoint.base_address == self._rank.memory.pool.bytes.data_ptr()
        return record


def _make_backend(name: TransferBackendName, host: str, _: TransferProtocol) -> TransferBackend:
    from transfer.backends.mooncake import MooncakeBackend

    backend = make_backend(name, host)
    assert isinstance(backend, MooncakeBackend)
    backend._protocol = TransferProtocol.RDMA
    return backend
