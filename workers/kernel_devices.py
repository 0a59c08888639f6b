"""Where the kernels of workers.kernels compute, instead of plain torch. Imports no Triton."""

from torch import Tensor

KERNEL_DEVICES = {"cuda"}


def has_kernels(x: Tensor) -> bool:
    """Whether what is done with ``x`` is done by a kernel."""
    return x.device.type in KERNEL_DEVICES
