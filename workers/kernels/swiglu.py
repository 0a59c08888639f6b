"""Kernel of silu(gate) * up (Shazeer, 2020) for halves side by side; the reference is workers.layers.feed_forward."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """Map ``gate_up [T, 2 * size]``, contiguous, to ``[T, size]``."""
    assert gate_up.is_contiguous(), f"strides {gate_up.stride()}"
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, size))
    if num_tokens:
        _swiglu_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](gate_up, out, SIZE=size, BLOCK=_BLOCK)
    return out


@triton.jit
def _swiglu_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = dims < SIZE
    given = tl.load(gate_up + token * 2 * SIZE + dims, mask=is_held, other=0.0)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + dims, mask=is_held, other=0.0).to(tl.float32)
    gate = given.to(tl.float32)
    tl.store(out + token * SIZE + dims, (gate / (1 + tl.exp(-gate)) * up).to(given.dtype), mask=is_held)
