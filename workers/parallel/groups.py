"""Rendezvous of a replica's workers: a key-value store, and one communicator per group of ranks."""

import logging
import os
import platform
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from cluster.spec.errors import PeerLostError
from cluster.spec.strategy import Collectives
from workers.device import CPU, Device
from workers.parallel.communicator import Backend, Communicator
from workers.parallel.shared_memory import SharedMemoryCollectives
from workers.parallel.torch_groups import GlooBackend, MovedBackend, NcclBackend

_LEFT = "left"
_FIRST_LOOK_S, _LOOK_EVERY_S = 0.001, 0.01
"""Poll intervals. They are short, because ranks usually arrive together and startup needs many exchanges."""


def exchange_at_start(store: Store, name: str, global_rank: int, world_size: int, word: str) -> list[str]:
    """Exchange one string per rank. Return all strings by global rank. All ranks must call this with a unique ``name``.

    Raises:
        PeerLostError: a rank has left or does not respond within the store's timeout, or the store is gone.
    """
    try:
        return exchange(store, name, global_rank, world_size, word)
    except RuntimeError as exc:
        raise PeerLostError(f"{name}: not all {world_size} ranks have responded: {exc}") from exc


def leave_store(store: Store, global_rank: int) -> None:
    """Announce that this rank is leaving, so that the others stop waiting for it."""
    with suppress(RuntimeError):  # the store may be gone together with its rank
        store.set(_LEFT, str(global_rank))


def exchange(store: Store, name: str, rank: int, size: int, word: str) -> list[str]:
    """Return the strings of a group's ranks. Raises RuntimeError if one is missing. ``store`` must have no prefix."""
    store.set(f"{name}/{rank}", word)
    words = [word_at(store, f"{name}/{peer}") for peer in range(size)]
    # A rank may have left after writing its string, and the next exchange would wait for it.
    _check_all_stay(store)
    return words


def word_at(store: Store, key: str) -> str:
    """Return the string stored under ``key``, once it is there. Raises RuntimeError if a rank leaves or time is up."""
    limit_s: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # the stubs leave it out
    end_s, pause_s = time.monotonic() + limit_s, _FIRST_LOOK_S
    while not store.check([key]):
        _check_all_stay(store)
        if time.monotonic() > end_s:
            raise RuntimeError(f"no response within {limit_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_EVERY_S)
    return bytes(store.get(key)).decode()


def _check_all_stay(store: Store) -> None:
    if store.check([_LEFT]):
        raise RuntimeError(f"rank {bytes(store.get(_LEFT)).decode()} has left")


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
    return os.open(f"/proc/{owner_pid}/fd/{word_at(store, key)}", os.O_RDWR | os.O_CLOEXEC)


ReplicaStore = TCPStore
"""Store through which the ranks of one replica exchange data until their groups are ready."""


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """Open the replica's store on a free port of ``host``, on global rank 0. Return the store and its port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(address: str, timeout_s: float) -> TCPStore:
    """Connect to the store of global rank 0 at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistNetworkError, dist.DistStoreError) as exc:
        raise PeerLostError(f"no store answered at {address} within {timeout_s} s: {exc}") from exc


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
