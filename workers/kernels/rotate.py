"""Rotary embedding (Su et al., 2021) of heads, with their normalisation where a model has one (Qwen3).

The references are workers.layers.rotary and workers.layers.rms_norm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of

_HEADS = 8


def rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Rotate ``x [T, heads, D]`` by ``cos`` and ``sin [T, 1, D]``; with a ``weight [D]``, normalise each head first."""
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(2) == 1, f"strides {x.stride()}"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    if num_tokens:
        _rotate_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            x,
            cos,
            sin,
            x if weight is None else weight,
            out,
            *x.stride()[:2],
            eps,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_HEADS=min(_HEADS, block_of(num_heads)),
            BLOCK_PAIRS=block_of(head_dim // 2),
            NORMS=weight is not None,
        )
    return out


@triton.jit
def _rotate_kernel(
    x, cos, sin, weight, out, token_stride, head_stride, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Dimensions i and i + D/2 are a pair; a program has both halves of some heads of a token."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_PAIRS)
    is_dim = dims < HALF
    is_held = (heads < NUM_HEADS)[:, None] & is_dim[None, :]
    places = x + token * token_stride + heads[:, None] * head_stride + dims[None, :]
    first_given = tl.load(places, mask=is_held, other=0.0)
    first, second = first_given.to(tl.float32), tl.load(places + HALF, mask=is_held, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(weight + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        first, second = first * scale * first_weight, second * scale * second_weight
    turn = token * HEAD_DIM + dims
    first_cos = tl.load(cos + turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + turn + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + turn + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    targets = out + (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(targets, (first * first_cos - second * first_sin).to(first_given.dtype), mask=is_held)
    tl.store(targets + HALF, (second * second_cos + first * second_sin).to(first_given.dtype), mask=is_held)
