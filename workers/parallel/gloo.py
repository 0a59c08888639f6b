"""Collectives between ranks on any hosts, over TCP."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.collectives import Work
from workers.parallel.torch_group import TorchGroup


class GlooBackend(TorchGroup):
    """Torch's Gloo process group, bound to one local address, since a machine's own name may not resolve."""

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        # Ranks wait for each other as long here as at the store itself.
        options._timeout = store.timeout  # type: ignore[attr-defined]  # the stubs leave it out
        group = dist.ProcessGroupGloo(store, rank, size, options)
        group._set_default_timeout(timeout)
        self._timeout = timeout
        super().__init__(group, rank, size)

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        """Shift as Communicator.start_shift does; empty tensors are not sent."""
        works: list[dist.Work] = []
        if tensor.numel():
            works.append(self._group.send([tensor], (self._rank + distance) % self._size, 0))
        self.received_bytes += output.nbytes
        if output.numel():
            works.append(self._group.recv([output], (self._rank - distance) % self._size, 0))
        return _Works(works, self._timeout)

    def leave(self) -> None:
        """Close the connections."""
        self._group = None


class _Works:
    """Several works combined; on its own, each would have the timeout of a first meeting."""

    def __init__(self, works: Sequence[dist.Work], timeout: timedelta) -> None:
        self._works = works
        self._timeout = timeout

    def wait(self) -> bool:
        return all(work.wait(self._timeout) for work in self._works)
