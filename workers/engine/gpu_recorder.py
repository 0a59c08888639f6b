"""Records what a GPU does, to be replayed. Imports no Triton."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Recorded = tuple[Tensor, Callable[[], None]]
"""What was computed, at a fixed place, and what computes it anew."""


class Record(Protocol):
    """Runs a computation and records it."""

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
        graph = torch.cuda.CUDAGraph()
        # Other threads copy pages and watch collectives meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            out = compute()
        return out, graph.replay
