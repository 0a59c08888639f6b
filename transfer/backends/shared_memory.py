"""Transfers within one host: regions are anonymous shared memory, and a write copies into the peer's region.

The memory is a memfd that peers open through its owner's ``/proc`` entry. It has no name in any file system, so the
kernel frees it no matter how its owner exits.
"""

import ctypes
import mmap
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.machine_memory import machine_memory
from cluster.spec.config import TransferBackendName
from cluster.spec.errors import TransferError, UserError
from cluster.spec.registry import Endpoint
from transfer.backends.interface import Region
from transfer.page_range import Span, check_bounds

_Bytes = npt.NDArray[np.uint8]

_MAP_FIXED = 0x10
_HUGE_PAGE = 2 << 20

_SESSION = re.compile(r"^(/proc/\d+/fd/\d+) (baton-[0-9a-f]{16})$")
"""Path of the owner's file descriptor and a unique name for the memory, since descriptor numbers are reused."""


class SharedMemoryBackend:
    """Backend whose regions other processes on the host can access until ``close``."""

    name = TransferBackendName.SHARED_MEMORY
    settle_s = 0.0

    def __init__(self) -> None:
        self._owned: list[int] = []
        self._peers: dict[str, _Bytes] = {}

    def allocate(self, num_bytes: int) -> Region:
        free_bytes = machine_memory().available
        if num_bytes > free_bytes:
            raise UserError(f"cannot allocate {num_bytes} bytes of shared memory: {free_bytes} are available")
        name = f"baton-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name)
        self._owned.append(descriptor)
        try:
            # Without this reservation, a lack of memory would cause a bus error in the middle of a forward pass.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            raise UserError(f"cannot allocate {num_bytes} bytes of shared memory: {error.strerror}") from error
        endpoint = Endpoint(
            backend=self.name,
            session=f"/proc/{os.getpid()}/fd/{descriptor} {name}",
            base_address=0,
            num_bytes=num_bytes,
        )
        return Region(_map_aligned(descriptor, num_bytes), endpoint)

    def register(self, address: int, num_bytes: int) -> Region:  # noqa: ARG002 - no GPU memory
        """Raise TransferError, since processes can share only memory that this backend allocates."""
        raise TransferError("transfer.backend: shared_memory supports only host memory")

    def write(self, source: Region, target: Endpoint, spans: Sequence[Span]) -> None:
        _copy(np.frombuffer(source.buffer, dtype=np.uint8), self._map(target), spans, target)

    def read(self, source: Endpoint, target: Region, spans: Sequence[Span]) -> None:
        _copy(self._map(source), np.frombuffer(target.buffer, dtype=np.uint8), spans, source)

    def drain(self, peer: Endpoint) -> None:
        """Do nothing, because a failed copy has ended."""

    def forget(self, target: Endpoint) -> None:
        """Unmap a peer's memory. If the peer is dead, this frees the memory."""
        self._peers.pop(target.session, None)

    def close(self) -> None:
        """End peers' access to local memory and unmap the peers' memory. Local memory stays valid while referenced."""
        self._peers.clear()
        while self._owned:
            os.close(self._owned.pop())

    def _map(self, target: Endpoint) -> _Bytes:
        if target.session not in self._peers:
            self._peers[target.session] = _open(target)
        return self._peers[target.session]


def _map_aligned(descriptor: int, num_bytes: int) -> memoryview:
    """Map memory to an address at which a huge page can begin. Raises UserError."""
    # The reserved addresses are more than needed. They are freed, with the memory, once nothing refers to them.
    reserved = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(reserved, dtype=np.uint8).ctypes.data
    offset = -address % _HUGE_PAGE
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_ssize_t
    map_memory.argtypes = (ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)
    # MAP_POPULATE prevents the first prompts from causing a page fault for every 4 KiB of KV.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
    if map_memory(address + offset, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) < 0:
        raise UserError(f"cannot map {num_bytes} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
    return memoryview(reserved)[offset : offset + num_bytes]


def _copy(source: _Bytes, target: _Bytes, spans: Sequence[Span], peer: Endpoint) -> None:
    check_bounds(spans, len(source), len(target), peer)
    for source_offset, target_offset, num_bytes in spans:
        np.copyto(target[target_offset : target_offset + num_bytes], source[source_offset : source_offset + num_bytes])


def _open(target: Endpoint) -> _Bytes:
    match = _SESSION.match(target.session)
    if match is None:
        raise TransferError(f"{target.session} is not the name of a shared memory region")
    path, name = match.groups()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"{path} cannot be opened: {error.strerror}; is its owner alive on this host?") from error
    try:
        if Path(f"/proc/self/fd/{descriptor}").readlink() != Path(f"/memfd:{name} (deleted)"):
            raise TransferError(f"{path} is no longer the region {name}")
        size = os.fstat(descriptor).st_size
        if size != target.num_bytes:
            raise TransferError(f"{path} has {size} bytes, but its owner announced {target.num_bytes}")
        return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
    finally:
        os.close(descriptor)
