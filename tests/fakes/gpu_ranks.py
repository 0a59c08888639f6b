"""Ranks and whole workers of this process on a GPU of twins."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.fakes import local_cluster
from tests.fakes.gpu_twin import TwinGpu
from workers import rank
from workers.attention.registry import BackendChoice
from workers.attention.triton.backend import TritonAttention
from workers.context_parallel.cost_model import Rates
from workers.engine import calibration, native_kernels, warm_up
from workers.worker import Worker


def start_ranks_on(gpu: TwinGpu, patch: pytest.MonkeyPatch) -> None:
    """Make ranks, and the workers of a LocalCluster, start on this GPU, with a short warm-up."""
    patch.setattr(rank, "open_device", lambda *_: gpu)
    patch.setattr(rank, "capture_maker", lambda _: lambda: gpu.capture)
    patch.setattr(native_kernels, "choose_backend", lambda *_: BackendChoice("triton", TritonAttention(), ""))
    patch.setattr(calibration, "calibrate", lambda *_: Rates())
    patch.setattr(warm_up, "KERNEL_STEPS", [(1, 0), (2, 16)])
    patch.setattr(local_cluster, "WorkerProcess", lambda _: WorkerThread(gpu))


class WorkerThread:
    """Worker with a stream of its own, in place of a WorkerProcess."""

    def __init__(self, gpu: TwinGpu) -> None:
        self._gpu, self._stream = gpu, gpu.copy_stream()
        self._thread = ThreadPoolExecutor(1)
        self._results: deque[Future[Any]] = deque()
        self._worker: Worker | None = None

    def call(self, method: str, *args: Any) -> None:
        self._results.append(self._thread.submit(self._call, method, args))

    def result(self) -> Any:
        return self._results.popleft().result()

    def stop(self) -> None:
        self.call("close")

    def close(self) -> None:
        self._thread.shutdown()

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        with self._gpu.on_stream(self._stream, None):
            if method == "make":
                self._worker = Worker(*args)
                return None
            result = getattr(self._worker, method)(*args)
            self._stream.run()  # long before the next call, a GPU has done its work
            return result
