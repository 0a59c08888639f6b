"""Ranks as threads of one process that communicate over TCP."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from cluster.spec.strategy import Collectives
from workers.device import Device
from workers.parallel.communicator import Communicator
from workers.parallel.groups import join_group

T = TypeVar("T")
_TIMEOUT_S = 240.0


def on_gloo_ranks(size: int, function: Callable[[Communicator], T], device: Device) -> list[T]:
    """Call a function on all ranks of a group in parallel. Return the results by rank."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=_TIMEOUT_S))

    def call(rank: int) -> T:
        group = join_group(
            store,
            "cp",
            range(size),
            rank,
            host="127.0.0.1",
            timeout_s=_TIMEOUT_S,
            collectives=Collectives.TCP,
            device=device,
        )
        try:
            return function(group)
        finally:
            group.destroy()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, range(size)))
