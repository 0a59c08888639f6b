"""Collectives of GPUs. What is started runs on a stream of its own; waiting holds up the stream, not the host."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.collectives import Work
from workers.parallel.gloo import Narrowed


class NcclBackend:
    """Torch's process group for tensors on GPUs, one GPU a rank."""

    in_background = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._rank, self._size = rank, size
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work:
        work: Work = self._group._allgather_base(output, tensor)
        return work

    def allreduce(self, tensor: Tensor, /) -> Work:
        """See Communicator.all_reduce; NCCL adds in the type it is given."""
        wide = tensor.float()
        work: Work = self._group.allreduce([wide])
        return work if wide is tensor else Narrowed(work, wide, tensor)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        work: Work = self._group.broadcast(tensor, root)
        return work

    def barrier(self) -> Work:
        work: Work = self._group.barrier()
        return work

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        """See Communicator.start_shift. Both directions are one call, or two ranks would wait for each other."""
        self._group._start_coalescing(self.device)
        if tensor.numel():
            self._group.send([tensor], (self._rank + distance) % self._size, 0)
        if output.numel():
            self._group.recv([output], (self._rank - distance) % self._size, 0)
        work: Work = self._group._end_coalescing(self.device)
        return work

    def leave(self) -> None:
        """End also what is under way."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
