"""Exchange of strings between the ranks of one replica at startup, through a store of its first rank."""

import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from cluster.spec.errors import PeerLostError

ReplicaStore = TCPStore
"""Store of one replica, which serves until its groups are ready."""

_LEFT = "left"
_FIRST_LOOK_S, _LOOK_EVERY_S = 0.001, 0.01
"""Poll intervals. They are short, because ranks usually arrive together and startup needs many exchanges."""


def open_store(host: str, timeout_s: float) -> tuple[ReplicaStore, int]:
    """Open the replica's store on a free port of ``host``, on global rank 0. Return the store and its port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = ReplicaStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(address: str, timeout_s: float) -> ReplicaStore:
    """Connect to the store of global rank 0 at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        return ReplicaStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistNetworkError, dist.DistStoreError) as exc:
        raise PeerLostError(f"no store answered at {address} within {timeout_s} s: {exc}") from exc


def exchange_at_start(store: Store, name: str, global_rank: int, world_size: int, value: str) -> list[str]:
    """Exchange one string per rank. Return all strings by global rank. All ranks must call this with a unique ``name``.

    Raises:
        PeerLostError: a rank has left or does not respond within the store's timeout, or the store is gone.
    """
    try:
        return exchange(store, name, global_rank, world_size, value)
    except RuntimeError as exc:
        raise PeerLostError(f"{name}: not all {world_size} ranks have responded: {exc}") from exc


def leave_store(store: Store, global_rank: int) -> None:
    """Announce that this rank is leaving, so that the others stop waiting for it."""
    with suppress(RuntimeError):  # the store may be gone together with its rank
        store.set(_LEFT, str(global_rank))


def exchange(store: Store, name: str, rank: int, size: int, value: str) -> list[str]:
    """Return the strings of a group's ranks. Raises RuntimeError if one is missing. ``store`` must have no prefix."""
    store.set(f"{name}/{rank}", value)
    values = [value_at(store, f"{name}/{peer}") for peer in range(size)]
    # A rank may have left after writing its string, and the next exchange would wait for it.
    _check_all_stay(store)
    return values


def value_at(store: Store, key: str) -> str:
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
