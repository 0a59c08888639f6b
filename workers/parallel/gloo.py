"""Collectives of ranks on any hosts, over TCP."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.collectives import Work


class GlooBackend:
    """Torch's process group, bound to one local address, since a machine's own name need not resolve."""

    in_background = True

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        self._rank, self._size = rank, size
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work:
        work: Work = self._group._allgather_base(output, tensor)
        return work

    def allreduce(self, tensor: Tensor, /) -> Work:
        """See Communicator.all_reduce; gloo adds in the type it is given."""
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
        """See Communicator.start_shift; what has no element is not sent."""
        works: list[Work] = []
        if tensor.numel():
            works.append(self._group.send([tensor], (self._rank + distance) % self._size, 0))
        if output.numel():
            works.append(self._group.recv([output], (self._rank - distance) % self._size, 0))
        return _Works(works)

    def leave(self) -> None:
        """Close the connections."""
        self._group = None


class _Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        return all(work.wait() for work in self._works)


class Narrowed:
    """A work on a wide copy, which ends in the tensor itself."""

    def __init__(self, work: Work, wide: Tensor, tensor: Tensor) -> None:
        self._work, self._wide, self._tensor = work, wide, tensor

    def wait(self) -> bool:
        done = self._work.wait()
        self._tensor.copy_(self._wide)
        return done
