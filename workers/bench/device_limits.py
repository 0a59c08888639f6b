"""Measured limits of a device, and times of launches on a GPU."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from workers.bench.results import DeviceLimits
from workers.memory.huge_pages import use_huge_pages

Launch = Callable[[], object]

_REPEATS = 20
_WARM_UPS = 3
_CACHE_BYTES = 256 << 20
"""Size of a buffer larger than any GPU cache. Reading it before each run evicts cached data and flushes writes."""
_SLEEP_CYCLES = 4_000_000
"""Delay of about 2 ms that lets the host run ahead, so that launch overhead is not measured."""
_MATRIX = 8192
_COPY_BYTES = 1 << 30
_CPU_MATRIX = 1024
_CPU_READ_BYTES = 256 << 20
_CPU_REPEATS = 5


class GpuTimer:
    """Timer of launches on one GPU with a cold cache."""

    def __init__(self, device: torch.device) -> None:
        self._cache = torch.zeros(_CACHE_BYTES, dtype=torch.uint8, device=device)

    def medians(self, launches: Sequence[Launch]) -> list[float]:
        """Return each launch's median time in seconds. Launches alternate, so that clock changes affect all of them."""
        rounds = [[self._time(launch) for launch in launches] for _ in range(_WARM_UPS + _REPEATS)]
        return [median(times) for times in zip(*rounds[_WARM_UPS:], strict=True)]

    def _time(self, launch: Launch) -> float:
        self._cache.sum()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        launch()
        end.record()
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        return seconds


def gpu_limits(device: torch.device, timer: GpuTimer) -> DeviceLimits:
    """Measure bf16 matrix products and copies in device memory."""
    a, b = (torch.randn(_MATRIX, _MATRIX, device=device).bfloat16() for _ in range(2))
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = timer.medians([lambda: a @ b, lambda: target.copy_(source)])
    return DeviceLimits(
        device=torch.cuda.get_device_name(device),
        flops_per_s=2 * _MATRIX**3 / product,
        bytes_per_s=2 * _COPY_BYTES / copy,
    )


def cpu_limits(dtype: torch.dtype) -> DeviceLimits:
    """Measure matrix products, and the rate at which one thread reads memory in huge pages."""
    a, b = torch.randn(2, _CPU_MATRIX, _CPU_MATRIX).to(dtype)
    source = torch.ones(_CPU_READ_BYTES // 8, dtype=torch.int64)
    use_huge_pages(source.data_ptr(), source.nbytes)
    return DeviceLimits(
        device="one CPU thread",
        flops_per_s=2 * _CPU_MATRIX**3 / min(_seconds(lambda: a @ b) for _ in range(_CPU_REPEATS)),
        bytes_per_s=_CPU_READ_BYTES / min(_seconds(source.sum) for _ in range(_CPU_REPEATS)),
    )


def _seconds(run: Launch) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
