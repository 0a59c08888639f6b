"""Compute device of a worker, a CPU or a GPU, with events and copies."""

import ctypes
import platform
from collections.abc import Sequence
from functools import cache

import torch

from cluster.spec.config import Device
from cluster.spec.errors import UserError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of mallopt(3)."""
_RETAINED_BYTES = 512 << 20
_LARGEST_BYTES = 32 << 20
"""Largest threshold that glibc accepts."""


def open_device(device: Device) -> torch.device:
    """Return the CPU, or make this process's first GPU current and return it.

    Raises:
        UserError: torch sees no GPU.
    """
    if device is Device.CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "has no CUDA" if torch.version.cuda is None else f"is for CUDA {torch.version.cuda} and sees no GPU"
        raise UserError(f"resources.device: got cuda, but torch {torch.__version__} {build}; allowed here: cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU. Do nothing on a CPU, which has no background work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Event = torch.cuda.Event
"""Event that completes after all GPU work started before it. None stands for an event that has completed."""


def event_on(device: torch.device) -> Event | None:
    """Record an event after all GPU work that this thread has started. Return None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class Arriving:
    """Copies of tensors to the host. GPU work started later does not delay them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._on_host = tensors
        self._there: Event | None = None
        if tensors[0].is_cuda:
            self._on_host = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._there = torch.cuda.current_stream(tensors[0].device).record_event()

    @property
    def is_there(self) -> bool:
        return self._there is None or bool(self._there.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._there is not None:
            self._there.synchronize()
        return self._on_host


def on_device(on_cpu: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device without blocking the host. Torch keeps the pinned memory until the copy is done."""
    if device.type == "cpu":
        return on_cpu
    return on_cpu.pin_memory().to(device, non_blocking=True) if on_cpu.numel() else on_cpu.to(device)


def index_on(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return integers as a tensor on the device. Indexing with a list would block the host during the copy."""
    return on_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)


def has_kernels(x: torch.Tensor) -> bool:
    """Return whether the kernels of workers.kernels support ``x``. If not, use torch."""
    return x.is_cuda


def use_cpu(num_threads: int) -> None:
    """Set the number of compute threads, and keep freed memory for the next layer.

    Without this, each large activation would use new memory, which the system clears page by page. That takes 6% of a
    prefill step with 4096 tokens.
    """
    torch.set_num_threads(num_threads)
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _RETAINED_BYTES)


@cache
def multiplies_bf16() -> bool:
    """Return whether the processor has bf16 instructions that torch uses. If not, fp32 is faster."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if platform.machine() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
