"""Kernels of what a layer does row by row between its products: Triton's on GPUs, native ones for bf16 on CPUs."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.kernel_devices import has_kernels
from workers.native.compile import compiled_library, find_compiler


class KvPlace(NamedTuple):
    """Where K and V of a step's tokens go, for a kernel of Triton's to store them when it has computed them."""

    layer_pages: Tensor
    """``[page, H, 2, slot, D]``."""
    slots: Tensor
    """``[T]`` int64."""


class RowKernels(Protocol):
    """Each rounds where plain torch does."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Normalise the last dimension of ``x [..., size]``."""
        ...

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, /) -> tuple[Tensor, Tensor]:
        """``x + y``, both ``[rows, size]``, and the same normalised."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0, /) -> Tensor:
        """Rotate ``x [T, heads, D]`` by ``cos`` and ``sin [T, 1, D]``; with a ``weight [D]``, normalise heads first."""
        ...

    def store_kv(self, layer_pages: Tensor, slots: Tensor, kv: Tensor, /) -> None:
        """Write rows ``kv [N, 2, H, D]`` to ``slots [N]`` int64 of ``layer_pages [page, H, 2, slot, D]``.

        Of rows with the same slot, which can only be the trash slot, any wins.
        """
        ...

    def swiglu(self, gate_up: Tensor, /) -> Tensor:
        """silu(gate) * up of the halves of ``[T, 2 * size]``."""
        ...


_REGISTERED: dict[tuple[str, torch.dtype], RowKernels] = {}
"""By device and type, those that this process computes with besides Triton's."""


def row_kernels(x: Tensor) -> RowKernels | None:
    """Those for ``x``; None where plain torch computes."""
    if has_kernels(x):
        from workers.kernels import rows

        return rows
    return _REGISTERED.get((x.device.type, x.dtype))


def use_native_rows() -> None:
    """Have bf16 rows on the CPU computed natively in this process from now on, on as many threads as torch has.

    Raises:
        CannotCompileError: there is no library, and can be none.
    """
    from workers.native.rows import NativeRows

    _REGISTERED["cpu", torch.bfloat16] = NativeRows(compiled_library(find_compiler()), torch.get_num_threads())
