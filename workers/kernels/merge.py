"""Merge of partials that each have all rows; the formula and the reference are in workers.attention.merge."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join partials ``[T, heads, D]`` with log-sum-exps ``[T, heads]`` fp32; see merge."""
    outs, lses = tuple(out.contiguous() for out in outs), tuple(lse.contiguous() for lse in lses)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    block_rows = 8
    if lse.numel():
        _merge_partials_kernel[(triton.cdiv(lse.numel(), block_rows),)](
            outs,
            lses,
            out,
            lse,
            lse.numel(),
            HEAD_DIM=out.shape[-1],
            BLOCK_ROWS=block_rows,
            BLOCK_DIM=block_of(out.shape[-1]),
        )
    return out, lse


@triton.jit(do_not_specialize=["num_rows"])
def _merge_partials_kernel(
    outs, lses, out, lse, num_rows,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    is_row = rows < num_rows
    is_held = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = rows[:, None] * HEAD_DIM + dims[None, :]
    joined = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    for at in tl.static_range(len(outs)):
        part_lse = tl.load(lses[at] + rows, mask=is_row, other=float("-inf"))
        part = tl.load(outs[at] + places, mask=is_held, other=0.0).to(tl.float32)
        new_peak = tl.maximum(peak, part_lse)
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay, weight = tl.exp(peak - reference), tl.exp(part_lse - reference)
        joined = joined * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        peak = new_peak
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    tl.store(lse + rows, tl.where(is_empty, float("-inf"), tl.log(total) + peak), mask=is_row)
    tl.store(out + places, (joined / total[:, None]).to(out.dtype.element_ty), mask=is_held)
