"""Root-mean-square normalization with a learned scale (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor, nn

from workers.kernels.elementwise import elementwise_kernels
from workers.layers.shard import ShardedLayer


class RMSNorm(ShardedLayer):
    """RMSNorm over the last dimension.

    Values are normalized in fp32 and cast back before scaling. In bf16, the opposite order would give different bits.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if (kernels := elementwise_kernels(x)) is not None:
            return kernels.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + y, each [rows, size], and the normalized sum. If ``y`` is None, it counts as zero."""
        if y is None:
            return x, self(x)
        if (kernels := elementwise_kernels(x)) is not None:
            return kernels.add_rms_norm(x, y, self.weight, self.eps)
        total = x + y
        return total, self(total)
