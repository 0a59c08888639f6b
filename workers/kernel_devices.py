"""The one question that decides between a kernel of workers.kernels and plain torch. Imports no Triton."""

from torch import Tensor


def has_kernels(x: Tensor) -> bool:
    """Return whether a kernel computes what is done with ``x``."""
    return x.is_cuda
