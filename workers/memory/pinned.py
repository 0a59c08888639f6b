"""Pinned host memory, which a GPU accesses directly."""

from collections.abc import Sequence

import numpy as np
import torch


class PinnedMemory:
    """Buffers pinned until ``close``, which must be called before they are freed: the GPU remembers their addresses."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Pin buffers, each once in a process; RuntimeError if the system does not allow as much."""
        self._addresses: list[int] = []
        for buffer in buffers:
            address = int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, buffer.nbytes, 0)))
            self._addresses.append(address)

    def close(self) -> None:
        """Wait for running copies and unpin; safe to call twice."""
        if not self._addresses:
            return
        torch.cuda.synchronize()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        while self._addresses:
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self._addresses.pop())))
