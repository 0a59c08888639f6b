"""Detection of ranks on the same host, and setup of their shared memory; in doubt, ranks count as remote."""

import logging
import os
import platform
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.shared_memory import SharedMemoryBackend
from workers.parallel.start_rendezvous import exchange, word_at

_log = logging.getLogger(__name__)


def host_identity() -> str | None:
    """Return an identity of processes that can map each other's memory and watch each other; None if none can."""
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "pidfd_open"):
        return None
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:
        return None


def meet_on_one_host(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> "SharedMemoryBackend | None":
    """Share memory with all other ranks of a group if all are on one host; otherwise return None on every rank.

    Every rank calls this; ``name`` is unique in the store. RuntimeError when a rank does not come.
    """
    identities = exchange(store, f"{name}/host", rank, size, host_identity() or f"alone {rank}")
    if len(set(identities)) > 1:
        return None
    pids = [int(pid) for pid in exchange(store, f"{name}/pid", rank, size, str(os.getpid()))]
    memory = f"{name}/memory"
    backend: SharedMemoryBackend | None = None
    try:
        descriptor = _create(store, memory, size) if rank == 0 else _open(word_at(store, memory), pids[0])
        backend = SharedMemoryBackend(descriptor, rank, pids, timeout.total_seconds())
    except (OSError, ValueError) as error:
        _log.warning("no shared memory with the ranks of processes %s: %s", pids, error)
    outcomes = exchange(store, f"{name}/outcome", rank, size, "failed" if backend is None else "mapped")
    return backend if set(outcomes) == {"mapped"} else None


def _create(store: Store, key: str, size: int) -> int:
    try:
        descriptor = os.memfd_create("baton-collectives")
        os.ftruncate(descriptor, SharedMemoryBackend.num_bytes(size))
    except OSError:
        store.set(key, "none")
        raise
    store.set(key, str(descriptor))
    return descriptor


def _open(descriptor: str, owner_pid: int) -> int:
    return os.open(f"/proc/{owner_pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
