"""How a worker process uses the CPU: its computing threads, and the memory of its activations."""

import ctypes
import platform
from functools import cache

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of mallopt(3)."""
_KEPT_BYTES = 512 << 20
_LARGEST_BYTES = 32 << 20
"""The most that glibc allows."""


def use_cpu(num_threads: int) -> None:
    """Set the number of computing threads, and keep freed memory for the next layer.

    Without the latter every large activation is new memory from the system, which clears it page by page: 6 % of the
    time of a prefill step of 4096 tokens.
    """
    torch.set_num_threads(num_threads)
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


@cache
def multiplies_bf16() -> bool:
    """Whether torch has products of bf16 by this processor's own instructions; else those of fp32 are faster."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if platform.machine() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
