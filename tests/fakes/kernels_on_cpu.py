"""Switch that makes product code use kernels on a CPU, where Triton interprets them."""

import sys

import pytest
from torch import Tensor


def kernels_on_cpu(patch: pytest.MonkeyPatch, *, on: bool = True) -> None:
    """Patch every loaded module that calls `has_kernels`. With ``on=False`` they use torch again."""

    def has_kernels(x: Tensor) -> bool:
        return on or x.is_cuda

    asking = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("workers.") and name != "workers.device" and hasattr(module, "has_kernels")
    ]
    assert asking, "nobody has asked yet"
    for module in asking:
        patch.setattr(module, "has_kernels", has_kernels)
