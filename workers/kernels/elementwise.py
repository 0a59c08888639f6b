"""Elementwise kernels between a layer's matrix products: Triton on GPUs, native code on CPUs."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.device import Device, device_of


class KvSlots(NamedTuple):
    """Slots into which a kernel writes the K and V of a step's tokens."""

    layer_pages: Tensor
    """``[page, H, 2, slot, D]``."""
    slots: Tensor
    """``[T]`` int64."""


class ElementwiseKernels(Protocol):
    """Interface of elementwise kernels. In bf16, their results are rounded wherever plain torch rounds."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Normalize the last dimension of ``x [..., size]``."""
        ...

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, /) -> tuple[Tensor, Tensor]:
        """Return ``x + y``, both ``[rows, size]``, and the normalized sum."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0, /) -> Tensor:
        """Rotate the first R elements of the heads ``x [T, heads, D]`` by ``cos`` and ``sin [T, 1, R]``.

        With a ``weight [D]``, normalize heads first.
        """
        ...

    def rotate_storing(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        weights: tuple[Tensor, Tensor] | None,
        eps: float,
        layer_pages: Tensor,
        slots: Tensor,
        /,
    ) -> Tensor:
        """Rotate Q and K in ``heads [T, Q + K + V heads, D]`` like ``rotate``, store K and V like ``store_kv``, and
        return Q.

        H in ``layer_pages [page, H, 2, slot, D]`` is the number of K heads. With ``weights`` for Q and K, normalize
        heads first.
        """
        ...

    def store_kv(self, layer_pages: Tensor, slots: Tensor, kv: Tensor, /) -> None:
        """Write rows ``kv [N, 2, H, D]`` to ``slots [N]`` int64 of ``layer_pages [page, H, 2, slot, D]``.

        Only the null slot may repeat. If it does, which row is written last is undefined.
        """
        ...

    def swiglu(self, gate_up: Tensor, /) -> Tensor:
        """Return silu(gate) * up, where ``gate_up [T, 2 * size]`` holds gate and up side by side."""
        ...


_REGISTERED: dict[tuple[Device, torch.dtype], ElementwiseKernels] = {}
"""Kernels of this process, except Triton's, by device and dtype."""


def elementwise_kernels(x: Tensor) -> ElementwiseKernels | None:
    """Return the kernels for ``x``, or None if plain torch must be used."""
    device = device_of(x)
    if device.has_kernels:
        from workers.kernels import triton_elementwise

        return triton_elementwise
    return _REGISTERED.get((device, x.dtype))


def register(device: Device, dtype: torch.dtype, kernels: ElementwiseKernels) -> None:
    _REGISTERED[device, dtype] = kernels
