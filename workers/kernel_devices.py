"""Where the kernels of workers.kernels compute, instead of plain torch. Imports no Triton."""

from torch import Tensor

on_cpu_too = False
"""For tests, which interpret them."""


def has_kernels(x: Tensor) -> bool:
    """Whether what is done with ``x`` is done by a kernel."""
    return x.is_cuda or on_cpu_too
