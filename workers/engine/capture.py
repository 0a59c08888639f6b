"""Capture of GPU work for replay. Does not import Triton."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

Captured = tuple[Tensor, Callable[[], None]]
"""Result tensor at a fixed address, and a function that replays its computation."""


class CaptureError(RuntimeError):
    """Computation that cannot be captured. It still runs uncaptured."""


class Capture(Protocol):
    """Runs a computation and captures it, or raises CaptureError."""

    def __call__(self, compute: Callable[[], Tensor]) -> Captured: ...


class GraphCapture:
    """Capture as CUDA graphs. They share their memory, since no two are replayed at the same time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Use the same ``stream`` for all captures, since libraries keep memory for each stream that they meet."""
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = stream

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        """Capture the third run; the first two compile kernels and warm up libraries."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph, usual = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads copy pages and watch collectives meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                out = compute()
        except RuntimeError as error:
            self._give_up(usual)
            raise CaptureError(str(error)) from error
        return out, graph.replay

    def _give_up(self, usual: torch.cuda.Stream) -> None:
        """Undo the state that torch leaves after a failed capture, so that steps can run as usual.

        Torch's stream is still the current one, and its allocator, which then asserts that it is not, may be
        capturing.
        """
        torch.cuda.set_stream(usual)
        with suppress(RuntimeError):  # it has ended that itself
            torch._C._cuda_endAllocateToPool(usual.device_index, self._memory)


def bytes_taken_by(device: torch.device, record: Callable[[], None]) -> int:
    """Return the GPU memory that a capture takes in torch, libraries and the driver together, in bytes."""
    free = _free_bytes(device)
    record()
    return max(free - _free_bytes(device), 0)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
