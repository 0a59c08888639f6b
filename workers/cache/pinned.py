"""Host memory that a GPU copies from and to by itself."""

from collections.abc import Sequence

import numpy as np
import torch


class PinnedMemory:
    """Some buffers, from now until it is closed, which must be before they go: the GPU remembers their addresses."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Each once in a process; RuntimeError where the system does not allow so much."""
        self._addresses: list[int] = []
        for buffer in buffers:
            address = int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, buffer.nbytes, 0)))
            self._addresses.append(address)

    def close(self) -> None:
        """Wait for copies that are under way, and let go; again: nothing."""
        if not self._addresses:
            return
        torch.cuda.synchronize()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        while self._addresses:
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self._addresses.pop())))
