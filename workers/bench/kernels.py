"""Times of GPU kernels against the limits of a device, for `baton bench kernels`."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from cluster.spec.config import Device
from workers.bench.results import DeviceLimits, KernelResult
from workers.bench.shapes import SHAPES
from workers.device import open_device

if TYPE_CHECKING:
    from workers.bench.kernel_cases import KernelCase

Launch = Callable[[], object]

_REPEATS = 20
_WARM_UPS = 3
_CACHE_BYTES = 256 << 20
"""Larger than any GPU cache: reading it before each run evicts the data and flushes pending writes."""
_SLEEP_CYCLES = 4_000_000
"""About 2 ms per launch, in which the host gets ahead, so that its launch overhead is not measured."""
_MATRIX = 8192
_COPY_BYTES = 1 << 30
_CPU_MATRIX = 1024
_CPU_COPY_BYTES = 64 << 20
_CPU_REPEATS = 5


class GpuTimer:
    """Times launches on one GPU with a cold cache."""

    def __init__(self, device: torch.device) -> None:
        self._cache = torch.zeros(_CACHE_BYTES, dtype=torch.uint8, device=device)

    def medians(self, ways: Sequence[Sequence[Launch]]) -> list[float]:
        """Return each way's median seconds of one of its launches; the ways alternate, so clock changes hit all."""
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(_WARM_UPS + _REPEATS):
            for of_way, launches in zip(times, ways, strict=True):
                of_way.append(self._time(launches))
        return [median(of_way[_WARM_UPS:]) for of_way in times]

    def _time(self, launches: Sequence[Launch]) -> float:
        self._cache.sum()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_SLEEP_CYCLES * len(launches))  # type: ignore[no-untyped-call]
        begin.record()
        # Results are held: otherwise the next one would be written to memory that is still cached.
        results = [launch() for launch in launches]
        end.record()
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        return seconds / len(results)


def gpu_limits(device: torch.device, timer: GpuTimer) -> DeviceLimits:
    """Measure bf16 matrix products, and copies in device memory."""
    a, b = (torch.randn(_MATRIX, _MATRIX, device=device).bfloat16() for _ in range(2))
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    [product], [copy] = (timer.medians([[run]]) for run in (lambda: a @ b, lambda: target.copy_(source)))
    return DeviceLimits(
        device=torch.cuda.get_device_name(device),
        flops_per_s=2 * _MATRIX**3 / product,
        bytes_per_s=2 * _COPY_BYTES / copy,
    )


def cpu_limits() -> DeviceLimits:
    a, b = torch.randn(2, _CPU_MATRIX, _CPU_MATRIX)
    source = torch.ones(_CPU_COPY_BYTES, dtype=torch.uint8)
    target = source.clone()
    return DeviceLimits(
        device="one CPU thread",
        flops_per_s=2 * _CPU_MATRIX**3 / min(_seconds(lambda: a @ b) for _ in range(_CPU_REPEATS)),
        bytes_per_s=2 * _CPU_COPY_BYTES / min(_seconds(lambda: target.copy_(source)) for _ in range(_CPU_REPEATS)),
    )


def _seconds(run: Launch) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


# TC


class KernelBench:
    def __init__(self) -> None:
        """Open the GPU; raises UserError if there is none."""
        self._device = open_device(Device.CUDA)
        self._timer = GpuTimer(self._device)
        self._limits = gpu_limits(self._device, self._timer)

    def close(self) -> None:
        """Do nothing: the end of the process releases everything."""

    def limits(self) -> DeviceLimits:
        return self._limits

    def measure(self, model: str) -> list[KernelResult]:
        from workers.bench.kernel_cases import Sizes, kernel_cases  # loads Triton

        with torch.inference_mode():
            cases = kernel_cases(SHAPES[model], Sizes(), self._device)
            return [self._result(model, copies) for copies in cases]

    def _result(self, model: str, copies: "Sequence[KernelCase]") -> KernelResult:
        """Time one kernel; its copies differ only in their memory."""
        case = copies[0]
        peers = [name for name in ("torch", "flash_attn") if name in case.peers]
        ways = [[copy.run for copy in copies], *([copy.peers[name] for copy in copies] for name in peers)]
        seconds, *others = self._timer.medians(ways)
        by_peer = dict(zip(peers, others, strict=True))
        return KernelResult(
            model=model,
            kernel=case.kernel,
            limit=case.limit,
            work=case.work,
            seconds=seconds,
            share_of_limit=case.work / self._limits.rate(case.limit) / seconds,
            torch_seconds=by_peer.get("torch"),
            flash_attn_seconds=by_peer.get("flash_attn"),
        )
