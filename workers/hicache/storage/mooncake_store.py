"""Storage of objects in Mooncake Store, which uses memory on many hosts and evicts the least recently used objects."""

import os
import socket
from collections.abc import Mapping, Sequence

# The client reads these variables when it is loaded. Its defaults log every step to stderr, wait half a minute for
# each response from a silent master, and retry many times.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "2000")
os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", "2000")
os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")

from mooncake.store import MooncakeDistributedStore

from cluster.spec.hicache_config import STORE_CLIENT_BYTES
from workers.hicache.storage.interface import NO_KEY, CorruptObjectError, Read, StorageError, StorageObject, Written

_MISSING = -704
"""Status returned for removing an object that does not exist."""
_REACH_S = 3.0
_NONSENSE = bytes(64)
"""Invalid request. A master closes the connection when it receives this."""


class MooncakeStorage:
    """Storage backend that keeps objects in a Mooncake Store cluster."""

    def __init__(self, host: str, master: str, lent_bytes: int = 0, key: bytes = NO_KEY) -> None:
        """Join the cluster, and lend it memory of this process.

        Workers lend none, because that memory would be lost with them. All clients that share pages have the same key.

        Raises:
            StorageError: no master is available now.
        """
        _reach(master)
        self.key = key
        self._client = MooncakeDistributedStore()
        status = self._client.setup(host, "P2PHANDSHAKE", lent_bytes, STORE_CLIENT_BYTES, "tcp", "", master)
        if status != 0:
            raise StorageError(f"no usable Mooncake master at {master} (status {status})")

    def present(self, depths: Mapping[str, int]) -> list[str]:
        found = self._client.batch_is_exist(list(depths)) if depths else []
        if any(status < 0 for status in found):
            raise StorageError(f"Mooncake Store cannot look up objects (status {min(found)})")
        return [name for name, status in zip(depths, found, strict=True) if status]

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        handles = self._client.batch_get_buffer([item.name for item in objects])
        # Objects that are missing or unreadable have no handle.
        there = self.present({item.name: 0 for item, handle in zip(objects, handles, strict=True) if handle is None})
        return [
            _take(memoryview(handle).cast("B"), item)
            if handle is not None
            else item.name in there and StorageError(f"{item.name} cannot be read from Mooncake Store")
            for item, handle in zip(objects, handles, strict=True)
        ]

    def write(self, objects: Sequence[StorageObject]) -> list[Written]:
        """Write objects, except those that the store already has."""
        statuses = [self._client.put_parts(item.name, *item.parts) for item in objects]
        return [
            StorageError(f"{item.name} cannot be written to Mooncake Store (status {status})") if status else None
            for item, status in zip(objects, statuses, strict=True)
        ]

    def delete(self, name: str) -> None:
        """Delete an object, even if readers hold it."""
        status = self._client.remove(name, True)
        if status not in (0, _MISSING):
            raise StorageError(f"{name} cannot be deleted from Mooncake Store (status {status})")

    def figures(self) -> None:
        """Return None. The master has its own metrics."""

    def close(self) -> None:
        """Leave the cluster. Objects in the memory that this process lent are lost."""
        self._client.close()


def _take(data: memoryview, item: StorageObject) -> Read:
    if len(data) != item.num_bytes:
        return CorruptObjectError(f"{item.name} has {len(data)} bytes, expected {item.num_bytes}")
    for part in item.parts:
        part[:] = data[: len(part)]
        data = data[len(part) :]
    return True


def _reach(master: str) -> None:
    """Check that a master responds, because joining blocks the interpreter until it succeeds or gives up.

    Raises:
        StorageError: no Mooncake master listens or responds at this address.
    """
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _REACH_S) as connection:
            connection.sendall(_NONSENSE)
            connection.recv(1)
    except ConnectionResetError:
        return  # the master closed the connection
    except TimeoutError as error:
        raise StorageError(f"the Mooncake master at {master} did not respond within {_REACH_S:g} s") from error
    except OSError as error:
        raise StorageError(f"cannot reach the Mooncake master at {master}: {error}") from error
