"""Common base of torch's process groups."""

from typing import Any

from torch import Tensor

from workers.parallel.collectives import CopiedBack, Work


class TorchGroup:
    """Process group of torch, over any transport."""

    in_background = True

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.received_bytes = 0
        """Bytes counted as a ring moves them, the least of all algorithms that these groups use."""
        self._group = group
        self._rank, self._size = rank, size

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work:
        self.received_bytes += (self._size - 1) * tensor.nbytes
        work: Work = self._group._allgather_base(output, tensor)
        return work

    def allreduce(self, tensor: Tensor, /) -> Work:
        """Sum as Communicator.all_reduce does; the group adds in the type it is given."""
        wide = tensor.float()
        self.received_bytes += 2 * (self._size - 1) * wide.nbytes // self._size
        work: Work = self._group.allreduce([wide])
        return work if wide is tensor else CopiedBack(work, wide, tensor)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        self.received_bytes += tensor.nbytes if self._rank != root else 0
        work: Work = self._group.broadcast(tensor, root)
        return work

    def barrier(self) -> Work:
        work: Work = self._group.barrier()
        return work
