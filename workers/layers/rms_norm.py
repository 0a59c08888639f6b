"""Root-mean-square normalisation with a learned scale (Zhang and Sennrich, 2019)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.kernel_devices import has_kernels
from workers.layers.cut import StoredPart, uncut


class RMSNorm(nn.Module):
    """Normalises the last dimension, of `size`.

    Computed in fp32 and cast back before the scale is applied; the order of these two decides the bits in bf16.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if has_kernels(x):
            from workers.kernels.rms_norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, each [rows, size], and the same normalised."""
        if has_kernels(x):
            from workers.kernels.rms_norm import add_rms_norm

            return add_rms_norm(x, y, self.weight, self.eps)
        total = x + y
        return total, self(total)

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        """The scale under its checkpoint name."""
        yield "weight", StoredPart(self.weight, (uncut(len(self.weight)),))
