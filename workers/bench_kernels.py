"""Measures this process's GPU, and the kernels on it, for `baton bench kernels`."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from cluster.spec.config import Device
from workers.device import open_device
from workers.kernel_result import H200, SHAPES, ChipLimits, KernelResult, Way

if TYPE_CHECKING:
    from workers.kernel_cases import KernelCase

_REPEATS = 20
_WARM_UPS = 3
_CACHE_BYTES = 256 << 20
"""More than any cache holds: read before each run, which then finds no data there, and nothing yet to be written."""
_SLEEP_CYCLES = 4_000_000
"""About 2 ms for each launch, in which the host gets ahead: what it needs for them is not the kernel's time."""
_MATRIX = 8192
_COPY_BYTES = 1 << 30


class KernelBench:
    """UserError where there is no GPU."""

    def __init__(self) -> None:
        self._device = open_device(Device.CUDA)
        self._cache = torch.zeros(_CACHE_BYTES, dtype=torch.uint8, device=self._device)
        self._limits: ChipLimits | None = None

    def close(self) -> None:
        """Nothing is held that the process's end does not give back."""

    def limits(self) -> ChipLimits:
        """What the chip can do, measured once."""
        if self._limits is None:
            a, b = (torch.randn(_MATRIX, _MATRIX, device=self._device).bfloat16() for _ in range(2))
            source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self._device)
            target, on_host = torch.empty_like(source), torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
            runs = (
                lambda: a @ b,
                lambda: target.copy_(source),
                lambda: on_host.copy_(source, non_blocking=True),
                lambda: target.copy_(on_host, non_blocking=True),
            )
            [product], [copy], [to_host], [from_host] = (self._seconds([[run]]) for run in runs)
            self._limits = ChipLimits(
                device=torch.cuda.get_device_name(self._device),
                flops_per_s=2 * _MATRIX**3 / product,
                bytes_per_s=2 * _COPY_BYTES / copy,
                to_host_bytes_per_s=_COPY_BYTES / to_host,
                from_host_bytes_per_s=_COPY_BYTES / from_host,
            )
        return self._limits

    def measure(self, model: str) -> list[KernelResult]:
        """Every kernel at the shapes of a model."""
        # Loads Triton.
        from workers.kernel_cases import Sizes, kernel_cases

        with torch.inference_mode():
            return [self._result(model, cases) for cases in kernel_cases(SHAPES[model], Sizes(), self._device)]

    def _result(self, model: str, cases: "Sequence[KernelCase]") -> KernelResult:
        """Of one kernel, whose cases differ in nothing but their memory."""
        case, limits = cases[0], self.limits()
        # A way that one of them has, all have.
        ways = [[each.run for each in cases], *([each.beside[way] for each in cases] for way in case.beside)]
        seconds, *others = self._seconds(ways)
        beside = dict(zip(case.beside, others, strict=True))
        unjoined = beside.get(Way.UNJOINED)
        return KernelResult(
            model=model,
            kernel=case.kernel,
            limit=case.limit,
            work=case.work,
            seconds=seconds,
            share_of_limit=limits.share(case.limit, case.work, seconds),
            share_of_h200=H200.share(case.limit, case.work, seconds) if limits.is_h200 else None,
            share_of_joining=None if unjoined is None else 1 - unjoined / seconds,
            torch_seconds=beside.get(Way.TORCH),
            flash_attn_seconds=beside.get(Way.FLASH_ATTN),
        )

    def _seconds(self, ways: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
        """Of each way the median time of one of its launches; they take turns, so that no change of clocks is one's."""
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(_WARM_UPS + _REPEATS):
            for of_way, launches in zip(times, ways, strict=True):
                of_way.append(self._time(launches))
        return [median(of_way[_WARM_UPS:]) for of_way in times]

    def _time(self, launches: Sequence[Callable[[], object]]) -> float:
        """Seconds on the GPU for one of some launches in a row."""
        self._cache.sum()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_SLEEP_CYCLES * len(launches))  # type: ignore[no-untyped-call]
        begin.record()
        # Each result is kept, or the next would be written where it still lies in the cache.
        results = [launch() for launch in launches]
        end.record()
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        return seconds / len(results)
