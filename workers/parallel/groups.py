"""Communicators of a replica's workers, one per group of ranks."""

import logging
import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from cluster.spec.errors import PeerLostError
from cluster.spec.strategy import Collectives
from workers.device import CPU, Device
from workers.parallel.communicator import Backend, Communicator
from workers.parallel.shared_memory import SharedMemoryCollectives
from workers.parallel.store import exchange, value_at
from workers.parallel.torch_groups import GlooBackend, MovedBackend, NcclBackend

_log = logging.getLogger(__name__)


def host_identity() -> str | None:
    """Return an identity shared by processes that can map each other's memory. None if no process can."""
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "pidfd_open"):
        return None
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:
        return None


def meet_on_one_host(
    store: Store, name: str, rank: int, size: int, timeout: timedelta
) -> "SharedMemoryCollectives | None":
    """Return collectives in shared memory if all ranks of a group are on one host. Otherwise return None on every rank.

    All ranks must call this with a unique ``name``. Raises RuntimeError if a rank is missing.
    """
    identities = exchange(store, f"{name}/host", rank, size, host_identity() or f"alone {rank}")
    if len(set(identities)) > 1:
        return None
    pids = [int(pid) for pid in exchange(store, f"{name}/pid", rank, size, str(os.getpid()))]
    memory = f"{name}/memory"
    backend: SharedMemoryCollectives | None = None
    try:
        descriptor = _create(store, memory, size) if rank == 0 else _open(store, memory, pids[0])
        backend = SharedMemoryCollectives(descriptor, rank, pids, timeout.total_seconds())
    except (OSError, ValueError) as error:
        _log.warning("the ranks of processes %s cannot share memory: %s", pids, error)
    outcomes = exchange(store, f"{name}/outcome", rank, size, "failed" if backend is None else "mapped")
    return backend if set(outcomes) == {"mapped"} else None


def _create(store: Store, key: str, size: int) -> int:
    try:
        descriptor = os.memfd_create("baton-collectives")
        os.ftruncate(descriptor, SharedMemoryCollectives.num_bytes(size))
    except OSError:
        store.set(key, "none")
        raise
    store.set(key, str(descriptor))
    return descriptor


def _open(store: Store, key: str, owner_pid: int) -> int:
    return os.open(f"/proc/{owner_pid}/fd/{value_at(store, key)}", os.O_RDWR | os.O_CLOEXEC)


def join_group(
    store: Store,
    name: str,
    members: Sequence[int],
    global_rank: int,
    *,
    host: str,
    timeout_s: float,
    collectives: Collectives = Collectives.AUTO,
    device: Device = CPU,
    use_nccl: bool = False,
) -> Communicator:
    """Join a group. Every member calls this. Members of several groups join them in the same order.

    ``members`` are global ranks in group order, ``name`` is unique in the store, and ``host`` is a local address that
    other members can reach. The wait ends at the store's timeout, or as soon as a rank of the replica leaves. A later
    collective that lacks a peer for ``timeout_s`` raises PeerLostError. Without NCCL, tensors on GPUs are copied to the
    host and back.
    """
    rank, size, timeout = members.index(global_rank), len(members), timedelta(seconds=timeout_s)
    if size == 1:
        return Communicator(name)
    scope = PrefixStore(name, store)
    backend: Backend | None = None
    try:
        # Torch's own rendezvous would not notice that a rank has left.
        exchange(store, f"{name}/here", rank, size, "here")
        if use_nccl:
            backend = MovedBackend(NcclBackend(scope, rank, size, timeout), device.torch_device)
        else:
            if collectives is Collectives.AUTO:
                backend = meet_on_one_host(store, f"{name}/same_host", rank, size, timeout)
            backend = backend or GlooBackend(scope, rank, size, host, timeout)
            backend = MovedBackend(backend, CPU.torch_device) if device.has_own_memory else backend
    except RuntimeError as exc:
        raise PeerLostError(f"group {name} of ranks {list(members)} could not be formed: {exc}") from exc
    return Communicator(name, rank, size, backend)
