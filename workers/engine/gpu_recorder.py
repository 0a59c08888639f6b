"""Records what a GPU does, to be replayed. Imports no Triton."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

Recorded = tuple[Tensor, Callable[[], None]]
"""What was computed, at a fixed place, and what computes it anew."""


class RecordingError(RuntimeError):
    """A computation that runs cannot be recorded; what there is goes on as before."""


class Record(Protocol):
    """Runs a computation and records it, or raises RecordingError."""

    def __call__(self, compute: Callable[[], Tensor]) -> Recorded: ...


class GpuRecorder:
    """Records CUDA graphs, which are never replayed at the same time and so share their memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """``stream`` is one for all recorders, since libraries keep memory of their own for each that they have met."""
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = stream

    def __call__(self, compute: Callable[[], Tensor]) -> Recorded:
        """The first two runs, which compile kernels and warm libraries up, are not recorded."""
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
            raise RecordingError(str(error)) from error
        return out, graph.replay

    def _give_up(self, usual: torch.cuda.Stream) -> None:
        """Undo what torch leaves behind where a recording fails, so that steps can run as usual.

        Its stream is still the current one, and its allocator, which then asserts that it is not, may be recording.
        """
        torch.cuda.set_stream(usual)
        with suppress(RuntimeError):  # it has ended that itself
            torch._C._cuda_endAllocateToPool(usual.device_index, self._memory)
