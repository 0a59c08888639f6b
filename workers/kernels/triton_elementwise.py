"""Elementwise kernels for GPUs. The references are the same operations on a CPU, in workers.layers and PagePool."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of

_HEADS = 8
_SWIGLU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return _launch_rms_norm(rows, None, weight, eps)[0].view(x.shape)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, total = _launch_rms_norm(x, y, weight, eps)
    return total, normed


def _launch_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if y is None else torch.empty_like(out)
    num_rows, size = x.shape
    block = block_of(size)
    if num_rows:
        added = x if y is None else y
        _rms_norm_kernel[(num_rows,)](
            *(x, added, weight, out, total),
            *(x.stride(0), added.stride(0), eps),
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
        # Round the sum, so that the norm applies to the value that the next layer adds to.
        summed = (wide + tl.load(y + row * y_stride + dims, mask=is_held, other=0.0).to(tl.float32)).to(given.dtype)
        tl.store(total + row * SIZE + dims, summed, mask=is_held)
        wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(given.dtype).to(tl.float32)
    scaled = tl.load(weight + dims, mask=is_held, other=0.0).to(tl.float32) * normed
    tl.store(out + row * SIZE + dims, scaled.to(given.dtype), mask=is_held)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    return _launch_rotate(x, cos, sin, weight, weight, eps, None, None)


def rotate_storing(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    layer_pages: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate the Q and K heads of ``heads [T, Q + K + V heads, D]``, store K and V like ``store_kv``, and return Q.

    H in ``layer_pages [page, H, 2, slot, D]`` is the number of K heads. ``weights`` are for Q and K.
    """
    q_weight, k_weight = weights or (None, None)
    return _launch_rotate(heads, cos, sin, q_weight, k_weight, eps, layer_pages, slots)


def _launch_rotate(
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
            *(x, cos.contiguous(), sin.contiguous()),
            *(x if weight is None else weight for weight in (q_weight, k_weight)),
            *(out, out if pages is None else pages, cos if slots is None else slots),
            *x.stride()[:2],
            *((0, 0, 0, 0) if pages is None else pages.stride()[:4]),
            eps,
            NUM_QUERIES=num_queries,
            NUM_STORED=num_stored,
            HEAD_DIM=head_dim,
            ROPE_DIM=cos.shape[-1],
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
    NUM_QUERIES: tl.constexpr, NUM_STORED: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Rotate dimension pairs i and i + R/2. A program computes both elements of all pairs of some heads of a token.

    NUM_STORED heads of K and as many of V follow the heads of Q. V is neither normalized nor rotated. Elements from R
    on form pairs, too, of the first and the second half of them, which are turned by no angle.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    TURNED: tl.constexpr = ROPE_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads, pairs = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_PAIRS)
    is_pair, is_turned = pairs < HALF, pairs < TURNED
    firsts, seconds = pairs, pairs + HALF
    if TURNED < HALF:
        firsts = tl.where(is_turned, pairs, pairs + TURNED)
        seconds = tl.where(is_turned, pairs + TURNED, pairs + HALF)
    is_held = (heads < NUM_QUERIES + 2 * NUM_STORED)[:, None] & is_pair[None, :]
    is_query = (heads < NUM_QUERIES)[:, None]
    given = x + token * token_stride + heads[:, None] * head_stride
    first_given = tl.load(given + firsts[None, :], mask=is_held, other=0.0)
    second_given = tl.load(given + seconds[None, :], mask=is_held, other=0.0)
    first, second = first_given.to(tl.float32), second_given.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(q_weight + firsts, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(q_weight + seconds, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        if NUM_STORED:
            first_of_k = tl.load(k_weight + firsts, mask=is_pair, other=0.0).to(tl.float32)[None, :]
            second_of_k = tl.load(k_weight + seconds, mask=is_pair, other=0.0).to(tl.float32)[None, :]
            first_weight = tl.where(is_query, first_weight, first_of_k)
            second_weight = tl.where(is_query, second_weight, second_of_k)
        first, second = first * scale * first_weight, second * scale * second_weight
    angle = token * ROPE_DIM + pairs
    first_cos = tl.load(cos + angle, mask=is_turned, other=1.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + angle + TURNED, mask=is_turned, other=1.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + angle + TURNED, mask=is_turned, other=0.0).to(tl.float32)[None, :]
    first_rotated = (first * first_cos - second * first_sin).to(first_given.dtype)
    second_rotated = (second * second_cos + first * second_sin).to(first_given.dtype)
    targets = out + (token * NUM_QUERIES + heads[:, None]) * HEAD_DIM
    tl.store(targets + firsts[None, :], first_rotated, mask=is_held & is_query)
    tl.store(targets + seconds[None, :], second_rotated, mask=is_held & is_query)
    if NUM_STORED:
        slot = tl.load(slots + token)
        which, stored = (heads - NUM_QUERIES) // NUM_STORED, (heads - NUM_QUERIES) % NUM_STORED
        rows = pages + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
        targets = rows + (which * which_stride + stored * page_head_stride)[:, None]
        is_value = (which == 1)[:, None]
        first_stored = tl.where(is_value, first_given, first_rotated)
        second_stored = tl.where(is_value, second_given, second_rotated)
        tl.store(targets + firsts[None, :], first_stored, mask=is_held & ~is_query)
        tl.store(targets + seconds[None, :], second_stored, mask=is_held & ~is_query)


def store_kv(layer_pages: Tensor, slots: Tensor, kv: Tensor) -> None:
    num_rows, _, num_heads, head_dim = kv.shape
    if num_rows:
        _store_kv_kernel[(num_rows, 2)](
            layer_pages,
            slots,
            kv,
            *layer_pages.stride()[:4],
            *kv.stride()[:3],
            PAGE_SIZE=layer_pages.shape[3],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_HEADS=block_of(num_heads),
            BLOCK_DIM=block_of(head_dim),
        )


@triton.jit
def _store_kv_kernel(
    pages, slots, kv, page_stride, head_stride, which_stride, slot_stride, row_stride, kv_which_stride, kv_head_stride,
    PAGE_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    heads, dims = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    is_held = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    source = kv + row * row_stride + which * kv_which_stride + heads[:, None] * kv_head_stride + dims[None, :]
    target = pages + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride + which * which_stride
    target += heads[:, None] * head_stride + dims[None, :]
    tl.store(target, tl.load(source, mask=is_held), mask=is_held)


def swiglu(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous(), f"strides {gate_up.stride()}"
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, size))
    if num_tokens:
        _swiglu_kernel[(num_tokens, triton.cdiv(size, _SWIGLU_BLOCK))](gate_up, out, SIZE=size, BLOCK=_SWIGLU_BLOCK)
    return out


@triton.jit
def _swiglu_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = dims < SIZE
    given = tl.load(gate_up + token * 2 * SIZE + dims, mask=is_held, other=0.0)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + dims, mask=is_held, other=0.0).to(tl.float32)
    gate = given.to(tl.float32)
    tl.store(out + token * SIZE + dims, (gate / (1 + tl.exp(-gate)) * up).to(given.dtype), mask=is_held)
