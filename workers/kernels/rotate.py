"""Rotary embedding (Su et al., 2021) of heads, with their normalisation where a model has one (Qwen3).

The references are workers.layers.rotary and workers.layers.rms_norm, and PagePool.write on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of

_HEADS = 8


def rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Rotate ``x [T, heads, D]`` by ``cos`` and ``sin [T, 1, D]``; with a ``weight [D]``, normalise each head first."""
    return _launch(x, cos, sin, weight, weight, eps, None, None)


def rotate_storing(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    layer_pages: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate Q and K of ``heads [T, those of Q, K and V, D]``, and store K and V as ``store_kv`` does; returns Q.

    The H of ``layer_pages [page, H, 2, slot, D]`` is the number of K heads; ``weights`` are those of Q and of K.
    """
    q_weight, k_weight = weights or (None, None)
    return _launch(heads, cos, sin, q_weight, k_weight, eps, layer_pages, slots)


def _launch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    pages: Tensor | None,
    slots: Tensor | None,
) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(2) == 1, f"strides {x.stride()}"
    num_stored = 0 if pages is None else pages.shape[1]
    num_queries = num_heads - 2 * num_stored
    out = torch.empty(num_tokens, num_queries, head_dim, dtype=x.dtype, device=x.device)
    if num_tokens:
        _rotate_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            x,
            cos.contiguous(),
            sin.contiguous(),
            x if q_weight is None else q_weight,
            x if k_weight is None else k_weight,
            out,
            out if pages is None else pages,
            cos if slots is None else slots,
            *x.stride()[:2],
            *((0, 0, 0, 0) if pages is None else pages.stride()[:4]),
            eps,
            NUM_QUERIES=num_queries,
            NUM_STORED=num_stored,
            HEAD_DIM=head_dim,
            PAGE_SIZE=1 if pages is None else pages.shape[3],
            BLOCK_HEADS=min(_HEADS, block_of(num_heads)),
            BLOCK_PAIRS=block_of(head_dim // 2),
            NORMS=q_weight is not None,
        )
    return out


@triton.jit
def _rotate_kernel(
    x, cos, sin, q_weight, k_weight, out, pages, slots,
    token_stride, head_stride, page_stride, page_head_stride, which_stride, slot_stride, eps,
    NUM_QUERIES: tl.constexpr, NUM_STORED: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Rotate dimension pairs i and i + D/2; a program has both halves of some heads of a token.

    Heads of K and of V, NUM_STORED each, follow those of Q; V is neither normalised nor rotated.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_PAIRS)
    is_dim = dims < HALF
    is_held = (heads < NUM_QUERIES + 2 * NUM_STORED)[:, None] & is_dim[None, :]
    is_query = (heads < NUM_QUERIES)[:, None]
    places = x + token * token_stride + heads[:, None] * head_stride + dims[None, :]
    first_given, second_given = (
        tl.load(places, mask=is_held, other=0.0),
        tl.load(places + HALF, mask=is_held, other=0.0),
    )
    first, second = first_given.to(tl.float32), second_given.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(q_weight + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(q_weight + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        if NUM_STORED:
            first_of_k = tl.load(k_weight + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
            second_of_k = tl.load(k_weight + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
            first_weight = tl.where(is_query, first_weight, first_of_k)
            second_weight = tl.where(is_query, second_weight, second_of_k)
        first, second = first * scale * first_weight, second * scale * second_weight
    turn = token * HEAD_DIM + dims
    first_cos = tl.load(cos + turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + turn + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + turn + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    first_turned = (first * first_cos - second * first_sin).to(first_given.dtype)
    second_turned = (second * second_cos + first * second_sin).to(first_given.dtype)
    targets = out + (token * NUM_QUERIES + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(targets, first_turned, mask=is_held & is_query)
    tl.store(targets + HALF, second_turned, mask=is_held & is_query)
    if NUM_STORED:
        slot = tl.load(slots + token)
        which, stored = (heads - NUM_QUERIES) // NUM_STORED, (heads - NUM_QUERIES) % NUM_STORED
        rows = pages + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
        targets = rows + (which * which_stride + stored * page_head_stride)[:, None] + dims[None, :]
        is_value = (which == 1)[:, None]
        tl.store(targets, tl.where(is_value, first_given, first_turned), mask=is_held & ~is_query)
        tl.store(targets + HALF, tl.where(is_value, second_given, second_turned), mask=is_held & ~is_query)
