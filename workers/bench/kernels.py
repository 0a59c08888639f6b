"""Roofline of the GPU kernels, for `baton bench kernels`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cluster.spec.config import Device
from workers.bench.results import DeviceLimits, KernelResult
from workers.bench.shapes import SHAPES
from workers.bench.timing import GpuTimer, gpu_limits
from workers.device import open_device

if TYPE_CHECKING:
    from workers.bench.kernel_cases import KernelCase


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
