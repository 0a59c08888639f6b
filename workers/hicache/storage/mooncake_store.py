"""Objects in a Mooncake Store cluster: memory of many hosts under one master, which gives up what is used least."""

import os
from collections.abc import Sequence

# The client reads its log level when it is loaded; without one it tells every step on stderr.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.store import MooncakeDistributedStore

from cluster.spec.errors import UserError
from workers.hicache.storage.interface import CorruptObjectError, StorageError, StorageStats

_BUFFER_BYTES = 128 << 20
"""Of the client, for objects on their way."""
_MISSING = -704
"""What removing an object that is not there gives."""


class MooncakeStorage:
    """See the module's first lines; the methods are those of ``StorageBackend``. The master divides the memory."""

    def __init__(self, host: str, master: str, lent_bytes: int) -> None:
        """Join the cluster, with so much memory of this process for everybody's objects.

        Raises:
            UserError: there is no master there.
        """
        self._lent_bytes = lent_bytes
        self._num_bytes = 0
        self._client = MooncakeDistributedStore()
        status = self._client.setup(host, "P2PHANDSHAKE", lent_bytes, _BUFFER_BYTES, "tcp", "", master)
        if status != 0:
            raise UserError(f"hicache.storage.master: no Mooncake master can be used at {master} (status {status})")

    def count_leading(self, names: Sequence[str]) -> int:
        """How many objects are there before the first that is not."""
        if not names:
            return 0
        found = self._client.batch_is_exist(list(names))
        if any(status < 0 for status in found):
            raise StorageError(f"Mooncake Store cannot tell what is there (status {min(found)})")
        return next((number for number, status in enumerate(found) if not status), len(names))

    def read(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Read an object."""
        handle = self._client.get_buffer(name)
        if handle is None:
            if self.count_leading([name]):
                raise StorageError(f"{name} cannot be read from Mooncake Store")
            return False
        data = memoryview(handle).cast("B")
        wanted = sum(len(part) for part in parts)
        if len(data) != wanted:
            raise CorruptObjectError(f"{name} has {len(data)} bytes, not {wanted}")
        for part in parts:
            part[:] = data[: len(part)]
            data = data[len(part) :]
        return True

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """Write an object; the store keeps one that is there already."""
        status = self._client.put_parts(name, *parts)
        if status != 0:
            raise StorageError(f"{name} cannot be written to Mooncake Store (status {status})")
        self._num_bytes += sum(len(part) for part in parts)

    def delete(self, name: str) -> None:
        """Remove an object, even if it was read a moment ago."""
        status = self._client.remove(name, True)
        if status not in (0, _MISSING):
            raise StorageError(f"{name} cannot be deleted from Mooncake Store (status {status})")

    def stats(self) -> StorageStats:
        """What this process has written, and lent."""
        return StorageStats(num_bytes=self._num_bytes, max_bytes=self._lent_bytes)

    def close(self) -> None:
        """Leave the cluster; objects in the memory of this process are lost."""
        self._client.close()
