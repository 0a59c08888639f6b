"""Measures this process's GPU, and the kernels on it, for `baton bench kernels`."""

from collections.abc import Callable
from statistics import median

import torch

from cluster.spec.config import Device
from workers.device import open_device
from workers.kernel_result import SHAPES, ChipLimits, KernelResult

_REPEATS = 20
_WARM_UPS = 3
_CACHE_BYTES = 256 << 20
"""More than any cache holds: written before each run, so that none finds its data there."""
_SLEEP_CYCLES = 4_000_000
"""About 2 ms, in which the host gets ahead: what it needs for the launches is not the kernel's time."""
_MATRIX = 8192
_COPY_BYTES = 1 << 30


class KernelBench:
    """UserError where there is no GPU."""

    def __init__(self) -> None:
        self._device = open_device(Device.CUDA)
        self._cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=self._device)
        self._limits: ChipLimits | None = None

    def close(self) -> None:
        """Nothing is held that the process's end does not give back."""

    def limits(self) -> ChipLimits:
        """What the chip can do, measured once."""
        if self._limits is None:
            a, b = (torch.randn(_MATRIX, _MATRIX, device=self._device).bfloat16() for _ in range(2))
            source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            self._limits = ChipLimits(
                device=torch.cuda.get_device_name(self._device),
                flops_per_s=2 * _MATRIX**3 / self._seconds(lambda: a @ b),
                bytes_per_s=2 * _COPY_BYTES / self._seconds(lambda: target.copy_(source)),
            )
        return self._limits

    def measure(self, model: str) -> list[KernelResult]:
        """Every kernel at the shapes of a model."""
        # Loads Triton.
        from workers.kernel_cases import Sizes, kernel_cases

        limits = self.limits()
        results = []
        with torch.inference_mode():
            for case in kernel_cases(SHAPES[model], Sizes(), self._device):
                seconds = self._seconds(case.run)
                results.append(
                    KernelResult(
                        model=model,
                        kernel=case.kernel,
                        limit=case.limit,
                        work=case.work,
                        seconds=seconds,
                        share_of_limit=case.work / limits.of(case.limit) / seconds,
                        torch_seconds=self._seconds(case.peer) if case.peer else None,
                        flash_attn_seconds=self._seconds(case.flash) if case.flash else None,
                    )
                )
        return results

    def _seconds(self, run: Callable[[], object]) -> float:
        """Median time on the GPU, with cold caches."""
        times: list[float] = []
        for number in range(_WARM_UPS + _REPEATS):
            self._cache.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            if number >= _WARM_UPS:
                times.append(begin.elapsed_time(end) / 1e3)
        return median(times)
