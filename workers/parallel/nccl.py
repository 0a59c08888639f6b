"""Collectives between GPUs. They run on their own stream; waiting blocks that stream's consumers, not the host."""

from datetime import timedelta
from threading import Thread

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.collectives import CompletedWork, Work
from workers.parallel.torch_group import TorchGroup

LEAVE_S = 10.0
"""Longest wait for running collectives; the process ends soon, and they end with it."""


class NcclBackend(TorchGroup):
    """Torch's process group for tensors on GPUs, one GPU per rank."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        super().__init__(dist.ProcessGroupNCCL(store, rank, size, options), rank, size)

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        """Shift as Communicator.start_shift does. Both directions are one call, or two ranks would wait for each
        other.
        """
        self._group._start_coalescing()
        try:
            if tensor.numel():
                self._group.send([tensor], (self._rank + distance) % self._size, 0)
            self.received_bytes += output.nbytes
            if output.numel():
                self._group.recv([output], (self._rank - distance) % self._size, 0)
        finally:
            # NCCL would add whatever this thread starts next to a call that was left open.
            work: Work | None = self._group._end_coalescing()
        return work or CompletedWork()  # None if nothing was moved

    def leave(self) -> None:
        """End the group, including running collectives.

        NCCL waits for ever for graphs that captured collectives of a group, and may do so for other groups.
        """
        group, self._group = self._group, None
        if group is not None:
            aborting = Thread(target=group.abort, name="abort", daemon=True)
            aborting.start()
            aborting.join(LEAVE_S)
