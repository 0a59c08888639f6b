"""Objects in a Mooncake Store cluster: memory of many hosts under one master, which gives up what is used least."""

import os
import socket
from collections.abc import Sequence

# The client reads these when it is loaded. By itself it tells every step on stderr, waits half a minute for each answer
# of a master that is silent, and begins anew many times.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "2000")
os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", "2000")
os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")

from mooncake.store import MooncakeDistributedStore

from workers.hicache.storage.interface import CorruptObjectError, StorageError

_BUFFER_BYTES = 128 << 20
"""Of the client, for objects on their way."""
_MISSING = -704
"""What removing an object that is not there gives."""
_REACH_S = 3.0
_NONSENSE = bytes(64)
"""No call that a master knows: it hangs up at once."""


class MooncakeStorage:
    """See the module's first lines; the methods are those of ``StorageBackend``. The master divides the memory."""

    def __init__(self, host: str, master: str, lent_bytes: int) -> None:
        """Join the cluster, with so much memory of this process for everybody's objects.

        Raises:
            StorageError: there is no master there now.
        """
        _reach(master)
        self._client = MooncakeDistributedStore()
        status = self._client.setup(host, "P2PHANDSHAKE", lent_bytes, _BUFFER_BYTES, "tcp", "", master)
        if status != 0:
            raise StorageError(f"no Mooncake master can be used at {master} (status {status})")

    def count_leading(self, names: Sequence[str]) -> int:
        """How many objects are there before the first that is not."""
        return next((number for number, is_there in enumerate(self._are_there(names)) if not is_there), len(names))

    def present(self, names: Sequence[str]) -> list[str]:
        """Those of these objects that are there."""
        return [name for name, is_there in zip(names, self._are_there(names), strict=True) if is_there]

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

    def delete(self, name: str) -> None:
        """Remove an object, even if it was read a moment ago."""
        status = self._client.remove(name, True)
        if status not in (0, _MISSING):
            raise StorageError(f"{name} cannot be deleted from Mooncake Store (status {status})")

    def figures(self) -> None:
        """The master alone knows, and tells it by metrics of its own."""

    def close(self) -> None:
        """Leave the cluster; objects in the memory of this process are lost."""
        self._client.close()

    def _are_there(self, names: Sequence[str]) -> list[bool]:
        """One call, however many names."""
        found = self._client.batch_is_exist(list(names)) if names else []
        if any(status < 0 for status in found):
            raise StorageError(f"Mooncake Store cannot tell what is there (status {min(found)})")
        return [bool(status) for status in found]


def _reach(master: str) -> None:
    """Because the client stops the whole interpreter until it has joined, or has given up.

    Raises:
        StorageError: nobody listens there, or nobody answers.
    """
    host, _, port = master.rpartition(":")
    if not port.isdecimal() or "//" in host:
        return  # a service that knows the master
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _REACH_S) as connection:
            connection.sendall(_NONSENSE)
            connection.recv(1)
    except ConnectionResetError:
        return  # hung up as well
    except TimeoutError as error:
        raise StorageError(f"the Mooncake master at {master} does not answer within {_REACH_S:g} s") from error
    except OSError as error:
        raise StorageError(f"no Mooncake master can be reached at {master}: {error}") from error
