"""Elementwise kernels between a layer's products: Triton's on GPUs, native ones for bf16 on CPUs."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.device import has_kernels


class KvSlots(NamedTuple):
    """Slots for K and V of a step's tokens, which a Triton kernel fills once it has computed them."""

    layer_pages: Tensor
    """``[page, H, 2, slot, D]``."""
    slots: Tensor
    """``[T]`` int64."""


class ElementwiseKernels(Protocol):
    """Interface of elementwise kernels, which round where plain torch does."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Normalise the last dimension of ``x [..., size]``."""
        ...

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, /) -> tuple[Tensor, Tensor]:
        """Return ``x + y``, both ``[rows, size]``, and the sum normalised."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0, /) -> Tensor:
        """Rotate ``x [T, heads, D]`` by ``cos`` and ``sin [T, 1, D]``; with a ``weight [D]``, normalise heads first."""
        ...

    def store_kv(self, layer_pages: Tensor, slots: Tensor, kv: Tensor, /) -> None:
        """Write rows ``kv [N, 2, H, D]`` to ``slots [N]`` int64 of ``layer_pages [page, H, 2, slot, D]``.

        Only the null slot may repeat; it then holds any of its rows.
        """
        ...

    def swiglu(self, gate_up: Tensor, /) -> Tensor:
        """Return silu(gate) * up of the halves of ``[T, 2 * size]``."""
        ...


_REGISTERED: dict[tuple[str, torch.dtype], ElementwiseKernels] = {}
"""Kernels of this process besides Triton's, by device and dtype."""


def elementwise_kernels(x: Tensor) -> ElementwiseKernels | None:
    """Return the kernels for ``x``; None if plain torch computes."""
    if has_kernels(x):
        from workers.kernels import triton_elementwise

        return triton_elementwise
    return _REGISTERED.get((x.device.type, x.dtype))


def register(device_type: str, dtype: torch.dtype, kernels: ElementwiseKernels) -> None:
    """Use these kernels in this process from now on."""
    _REGISTERED[device_type, dtype] = kernels
