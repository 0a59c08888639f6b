"""Torch's process groups as backends, and a backend that copies tensors to another backend's device."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.communicator import Backend, Work

LEAVE_S = 10.0
"""Maximum wait in seconds for running collectives when leaving. Those still running end with the process soon after."""


class CopiedBack:
    """Collective on a copy of a tensor; ``wait`` copies the result back."""

    def __init__(self, work: Work, copy: Tensor, tensor: Tensor) -> None:
        self._work, self._copy, self._tensor = work, copy, tensor

    def wait(self) -> bool:
        done = self._work.wait()
        self._tensor.copy_(self._copy)
        return done


class TorchGroup:
    in_background = True

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._rank, self._size = rank, size

    def all_gather(self, output: Tensor, tensor: Tensor, /) -> Work:
        work: Work = self._group._allgather_base(output, tensor)
        return work

    def open_all_gather(self, num_bytes: int, /) -> None:
        """Return None, since ranks share no memory."""

    def all_reduce(self, tensor: Tensor, /) -> Work:
        """Sum in fp32, since the group adds in the given dtype."""
        wide = tensor.float()
        work: Work = self._group.allreduce([wide])
        return work if wide is tensor else CopiedBack(work, wide, tensor)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        work: Work = self._group.broadcast(tensor, root)
        return work

    def barrier(self) -> Work:
        work: Work = self._group.barrier()
        return work


class GlooBackend(TorchGroup):
    """Torch's Gloo process group, bound to a local address because the machine's own name may not resolve."""

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        # Ranks wait as long here as at the store.
        options._timeout = store.timeout  # type: ignore[attr-defined]  # the stubs leave it out
        group = dist.ProcessGroupGloo(store, rank, size, options)
        group._set_default_timeout(timeout)
        self._timeout = timeout
        super().__init__(group, rank, size)

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        works: list[dist.Work] = []
        if tensor.numel():
            works.append(self._group.send([tensor], (self._rank + distance) % self._size, 0))
        if output.numel():
            works.append(self._group.recv([output], (self._rank - distance) % self._size, 0))
        return _Works(works, self._timeout)

    def leave(self) -> None:
        self._group = None


class _Works:
    """Several running operations, each with the given timeout instead of the rendezvous's longer default."""

    def __init__(self, works: Sequence[dist.Work], timeout: timedelta) -> None:
        self._works = works
        self._timeout = timeout

    def wait(self) -> bool:
        return all(work.wait(self._timeout) for work in self._works)


class NcclBackend(TorchGroup):
    """Torch's process group for tensors on GPUs, one GPU per rank."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        super().__init__(dist.ProcessGroupNCCL(store, rank, size, options), rank, size)

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        """Shift in one call, since two ranks that send first would wait for each other."""
        self._group._start_coalescing()
        try:
            if tensor.numel():
                self._group.send([tensor], (self._rank + distance) % self._size, 0)
            if output.numel():
                self._group.recv([output], (self._rank - distance) % self._size, 0)
        finally:
            # End the joint call even after an error, or NCCL would add this thread's next collective to it.
            work: Work | None = self._group._end_coalescing()
        return work or _Works([], timedelta())  # None if there is nothing to send

    def leave(self) -> None:
        """End the group, including running collectives.

        NCCL can block forever here if graphs captured the group's collectives, so the wait is limited.
        """
        group, self._group = self._group, None
        if group is not None:
            aborting = Thread(target=group.abort, name="abort", daemon=True)
            aborting.start()
            aborting.join(LEAVE_S)


class MovedBackend:
    """Backend that copies tensors to another backend's device, and results back, unless already on that device."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.in_background = backend.in_background
        self._backend, self._device = backend, device

    def all_gather(self, output: Tensor, tensor: Tensor, /) -> Work:
        return self._into(output, lambda there: self._backend.all_gather(there, tensor.to(self._device)))

    def open_all_gather(self, num_bytes: int, /) -> None:
        """Return None, since parts may be on another device."""

    def all_reduce(self, tensor: Tensor, /) -> Work:
        return self._in_place(tensor, self._backend.all_reduce)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        return self._in_place(tensor, lambda there: self._backend.broadcast(there, root))

    def barrier(self) -> Work:
        return self._backend.barrier()

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        return self._into(output, lambda there: self._backend.shift(there, tensor.to(self._device), distance))

    def leave(self) -> None:
        self._backend.leave()

    def _into(self, output: Tensor, begin: Callable[[Tensor], Work]) -> Work:
        if output.device == self._device:
            return begin(output)
        there = torch.empty_like(output, device=self._device)
        return CopiedBack(begin(there), there, output)

    def _in_place(self, tensor: Tensor, begin: Callable[[Tensor], Work]) -> Work:
        if tensor.device == self._device:
            return begin(tensor)
        there = tensor.to(self._device)
        return CopiedBack(begin(there), there, tensor)
