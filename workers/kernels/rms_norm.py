"""Root-mean-square normalisation (Zhang and Sennrich, 2019), alone or of a sum.

The reference is workers.layers.rms_norm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of ``x [..., size]``."""
    rows = x.reshape(-1, x.shape[-1])
    return _launch(rows, None, weight, eps)[0].view(x.shape)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x + y``, both ``[rows, size]``, and the sum normalised."""
    normed, total = _launch(x, y, weight, eps)
    return total, normed


def _launch(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if y is None else torch.empty_like(out)
    num_rows, size = x.shape
    block = block_of(size)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            x,
            x if y is None else y,
            weight,
            out,
            total,
            x.stride(0),
            x.stride(0) if y is None else y.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            ADDS=y is not None,
            num_warps=min(max(block // 512, 1), 16),
        )
    return out, total


@triton.jit
def _rms_norm_kernel(
    x, y, weight, out, total, x_stride, y_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_held = dims < SIZE
    given = tl.load(x + row * x_stride + dims, mask=is_held, other=0.0)
    wide = given.to(tl.float32)
    if ADDS:
        # Rounded, so that the normalised value is the one that the next layer adds to.
        summed = (wide + tl.load(y + row * y_stride + dims, mask=is_held, other=0.0).to(tl.float32)).to(given.dtype)
        tl.store(total + row * SIZE + dims, summed, mask=is_held)
        wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(given.dtype).to(tl.float32)
    scaled = tl.load(weight + dims, mask=is_held, other=0.0).to(tl.float32) * normed
    tl.store(out + row * SIZE + dims, scaled.to(given.dtype), mask=is_held)
