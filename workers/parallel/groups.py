"""How the workers of a replica find each other: a key-value store, and one communicator for each group of ranks."""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from cluster.spec.config import Device
from cluster.spec.strategy import Collectives
from workers.parallel.checked import CheckedBackend, Notes
from workers.parallel.collectives import Backend, CollectiveError, Communicator
from workers.parallel.gloo import GlooBackend
from workers.parallel.moved import MovedBackend
from workers.parallel.same_host import meet_on_one_host

ReplicaStore = TCPStore
"""Where the ranks of one replica leave each other notes until their groups stand."""


_LEFT = "left"
_LOOK_EVERY_S = 0.01


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """Open the replica's store on a free port of one local address; returns it with the port. For global rank 0."""
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
        raise CollectiveError(f"no store answered at {address} within {timeout_s} s: {exc}") from exc


def told_by_all(store: Store, name: str, global_rank: int, world_size: int, word: str) -> list[str]:
    """Everybody's word, by global rank; every rank of the replica calls this. ``name`` is unique in the store.

    Raises:
        CollectiveError: a rank has left, or says nothing within the store's timeout, or the store is gone.
    """
    try:
        store.set(f"{name}/{global_rank}", word)
        return [_word(store, f"{name}/{rank}") for rank in range(world_size)]
    except RuntimeError as exc:
        raise CollectiveError(f"{name}: not all of {world_size} ranks have told theirs: {exc}") from exc


def leave_store(store: Store, global_rank: int) -> None:
    """Let those that wait for this rank's word know that it will say none."""
    with suppress(RuntimeError):  # the store may have gone with its rank
        store.set(_LEFT, str(global_rank))


def _word(store: Store, key: str) -> str:
    limit_s: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # the stubs leave it out
    end_s = time.monotonic() + limit_s
    while not store.check([key]):
        if store.check([_LEFT]):
            raise RuntimeError(f"rank {bytes(store.get(_LEFT)).decode()} has left")
        if time.monotonic() > end_s:
            raise RuntimeError(f"nothing within {limit_s:g} s")
        time.sleep(_LOOK_EVERY_S)
    return bytes(store.get(key)).decode()


def join_group(
    store: Store,
    name: str,
    members: Sequence[int],
    global_rank: int,
    *,
    host: str,
    timeout_s: float,
    collectives: Collectives = Collectives.AUTO,
    check: bool = False,
    device: Device = Device.CPU,
) -> Communicator:
    """Meet the other members of a group; every member calls this, for several groups in the same order.

    ``members`` are global ranks in group order, ``name`` is unique in the store, ``host`` is the local address
    other members can reach. A later call that lacks a peer for ``timeout_s`` raises CollectiveError; with ``check``,
    for which all groups of a replica have one store, so does one that differs from a peer's. On a GPU, what the ranks
    exchange goes over NCCL, unless ``collectives`` asks for TCP; then it goes through the host.
    """
    rank, size = members.index(global_rank), len(members)
    if size == 1:
        return Communicator(name)
    timeout = timedelta(seconds=timeout_s)
    scope = PrefixStore(name, store)
    scope.set_timeout(timeout)
    try:
        backend = _meet(scope, rank, size, host, timeout, collectives, device)
    except RuntimeError as exc:
        raise CollectiveError(f"group {name} of ranks {list(members)} did not meet: {exc}") from exc
    notes = Notes(PrefixStore("begun", store), name, members, global_rank)
    checked = CheckedBackend(backend, rank, size, notes) if check else backend
    return Communicator(name, rank, size, checked, skips_empty=not check)


def _meet(
    store: Store, rank: int, size: int, host: str, timeout: timedelta, collectives: Collectives, device: Device
) -> Backend:
    if device is Device.CUDA and collectives is Collectives.AUTO:
        # Not in torch's builds for the CPU.
        from workers.parallel.nccl import NcclBackend

        nccl = NcclBackend(store, rank, size, timeout)
        return MovedBackend(nccl, nccl.device)
    backend: Backend | None = None
    if collectives is Collectives.AUTO:
        backend = meet_on_one_host(PrefixStore("same_host", store), rank, size, timeout)
    backend = backend or GlooBackend(store, rank, size, host, timeout)
    return backend if device is Device.CPU else MovedBackend(backend, torch.device("cpu"))
