"""Writes of keys and values from gathered order into their pages; the reference is PagePool.write on a CPU."""

import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of


def store_kv(layer_pages: Tensor, slots: Tensor, kv: Tensor) -> None:
    """Write rows ``kv [N, 2, H, D]`` to ``slots [N]`` int64 of ``layer_pages [page, H, 2, slot, D]``.

    Strides are any, but the elements of a head are adjacent. If rows have the same slot, which can only be the null
    slot, any wins.
    """
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
