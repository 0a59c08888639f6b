"""Rendezvous of a replica's workers: a key-value store, and one communicator per group of ranks."""

import socket
from collections.abc import Sequence
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
from workers.parallel.start_rendezvous import exchange

ReplicaStore = TCPStore
"""Store at which the ranks of one replica exchange data until their groups are up."""


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """Open the replica's store on a free port of one local address; return it with the port. For global rank 0."""
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
    other members can reach. The wait ends at the store's timeout, or as soon as a rank of the replica has left. A
    later call that lacks a peer for ``timeout_s`` raises CollectiveError; with ``check``,
    for which all groups of a replica have one store, so does one that differs from a peer's. On a GPU, collectives
    use NCCL, unless ``collectives`` asks for TCP through the host.
    """
    rank, size = members.index(global_rank), len(members)
    if size == 1:
        return Communicator(name)
    try:
        # Torch's own rendezvous would not see that a rank has left.
        exchange(store, f"{name}/here", rank, size, "here")
        backend = _meet(store, name, rank, size, host, timedelta(seconds=timeout_s), collectives, device)
    except RuntimeError as exc:
        raise CollectiveError(f"group {name} of ranks {list(members)} did not meet: {exc}") from exc
    if check:
        backend = CheckedBackend(backend, rank, size, Notes(PrefixStore("begun", store), name, members, global_rank))
    return Communicator(name, rank, size, backend, skips_empty=not check)


def _meet(
    store: Store,
    name: str,
    rank: int,
    size: int,
    host: str,
    timeout: timedelta,
    collectives: Collectives,
    device: Device,
) -> Backend:
    scope = PrefixStore(name, store)
    if device is Device.CUDA and collectives is Collectives.AUTO:
        # Not in torch's builds for the CPU.
        from workers.parallel.nccl import NcclBackend

        gpu = torch.device("cuda", torch.cuda.current_device())
        return MovedBackend(NcclBackend(scope, rank, size, timeout), gpu)
    backend: Backend | None = None
    if collectives is Collectives.AUTO:
        backend = meet_on_one_host(store, f"{name}/same_host", rank, size, timeout)
    backend = backend or GlooBackend(scope, rank, size, host, timeout)
    return backend if device is Device.CPU else MovedBackend(backend, torch.device("cpu"))
