"""Collectives of tensors on another device than the backend's: counts over NCCL, or a GPU's tensors over TCP."""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.parallel.collectives import Backend, CopiedBack, Work


class MovedBackend:
    """Wrapper that copies tensors to a backend's device, and results back; tensors already there are passed as they
    are.
    """

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.in_background = backend.in_background
        self._backend, self._device = backend, device

    @property
    def received_bytes(self) -> int:
        """Return the bytes of the wrapped backend."""
        return self._backend.received_bytes

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work:
        return self._into(output, lambda there: self._backend._allgather_base(there, tensor.to(self._device)))

    def allreduce(self, tensor: Tensor, /) -> Work:
        return self._in_place(tensor, self._backend.allreduce)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        return self._in_place(tensor, lambda there: self._backend.broadcast(there, root))

    def barrier(self) -> Work:
        return self._backend.barrier()

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        return self._into(output, lambda there: self._backend.shift(there, tensor.to(self._device), distance))

    def leave(self) -> None:
        self._backend.leave()

    def _into(self, output: Tensor, begin: Callable[[Tensor], Work]) -> Work:
        if output.device.type == self._device.type:
            return begin(output)
        there = torch.empty_like(output, device=self._device)
        return CopiedBack(begin(there), there, output)

    def _in_place(self, tensor: Tensor, begin: Callable[[Tensor], Work]) -> Work:
        if tensor.device.type == self._device.type:
            return begin(tensor)
        there = tensor.to(self._device)
        return CopiedBack(begin(there), there, tensor)
