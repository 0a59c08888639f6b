"""Transfers inside one host: a region is a memory-mapped file, a write is a memcpy into the peer's file.

The owner holds a lock on its file as long as it lives, so a file whose lock is free was left by a dead process.
"""

import fcntl
import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.spec.config import TransferBackendName
from cluster.spec.errors import TransferError, UserError
from cluster.spec.registry import Endpoint
from transfer.backends.interface import Region, out_of_bounds
from transfer.plan import Span

_NAME = re.compile(r"^baton-\d+-[0-9a-f]{8}$")


def folders() -> list[Path]:
    """Where region files may lie, best first: memory, then the folder of temporary files."""
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]


def remove_stale() -> list[Path]:
    """Delete the region files whose owner is gone, and return them."""
    found = [path for folder in folders() if folder.is_dir() for path in folder.iterdir() if _NAME.match(path.name)]
    return [path for path in found if _remove_if_stale(path)]


class SharedMemoryBackend:
    """Regions as files under /dev/shm, named ``baton-<pid>-<random>`` and deleted by ``close``."""

    name = TransferBackendName.SHARED_MEMORY
    settle_s = 0.0

    def __init__(self) -> None:
        self._owned: dict[Path, int] = {}
        self._peers: dict[str, npt.NDArray[np.uint8]] = {}

    def allocate(self, num_bytes: int) -> Region:
        """Make a region file of that size, with its pages reserved."""
        failures = []
        for folder in folders():
            try:
                path, descriptor = _create(folder, num_bytes)
            except OSError as error:
                failures.append(f"{folder}: {error.strerror}")
                continue
            self._owned[path] = descriptor
            endpoint = Endpoint(backend=self.name, session=str(path), base_address=0, num_bytes=num_bytes)
            return Region(memoryview(mmap.mmap(descriptor, num_bytes)), endpoint)
        raise UserError(f"no room for {num_bytes} bytes of shared memory ({'; '.join(failures)})")

    def write(self, source: Region, target: Endpoint, spans: Sequence[Span]) -> None:
        """Copy spans into the peer's file."""
        if wrong := out_of_bounds(spans, len(source.buffer), target.num_bytes):
            raise TransferError(f"{target.session}: {wrong}")
        peer = self._map(target)
        ours = np.frombuffer(source.buffer, dtype=np.uint8)
        for source_offset, target_offset, num_bytes in spans:
            np.copyto(peer[target_offset : target_offset + num_bytes], ours[source_offset : source_offset + num_bytes])

    def forget(self, target: Endpoint) -> None:
        """Unmap a peer's file, which gives its memory back if the peer is gone."""
        self._peers.pop(target.session, None)

    def close(self) -> None:
        """Delete own files and unmap those of peers; own memory lives on while something refers to it."""
        self._peers.clear()
        while self._owned:
            path, descriptor = self._owned.popitem()
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _map(self, target: Endpoint) -> npt.NDArray[np.uint8]:
        if target.session not in self._peers:
            self._peers[target.session] = _open(target)
        return self._peers[target.session]


def _create(folder: Path, num_bytes: int) -> tuple[Path, int]:
    """A new locked file; an OSError if it does not fit."""
    path = folder / f"baton-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Without this a full /dev/shm shows as a bus error in the middle of a forward pass.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    if path.exists():
        return path, descriptor
    # Another process took the file for a stale one in the moment before it was locked.
    os.close(descriptor)
    return _create(folder, num_bytes)


def _open(target: Endpoint) -> npt.NDArray[np.uint8]:
    path = Path(target.session)
    if not _NAME.match(path.name) or path.parent not in folders():
        raise TransferError(f"{path} is not the name of a shared memory region")
    try:
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size != target.num_bytes:
                raise TransferError(f"{path} has {size} bytes, its owner said {target.num_bytes}")
            return np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)
    except OSError as error:
        raise TransferError(f"{path} cannot be opened: {error.strerror}; is its owner on this host?") from error


def _remove_if_stale(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
