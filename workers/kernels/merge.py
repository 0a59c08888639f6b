"""Joining partials of attention; the formula and the reference are workers.context_parallel.merge."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of

JOIN_FIELDS = ("row", "first", "step", "count")
"""A row of the result, and where its parts are: ``count`` rows of what was found, from ``first`` on in steps."""

_NUM_JOIN_FIELDS = tl.constexpr(len(JOIN_FIELDS))
_PARTS_AT_ONCE = 16
"""With many more, registers spill."""


def merge_parts(found: Tensor, found_lse: Tensor, joins: Tensor, out: Tensor, lse: Tensor) -> None:
    """Join what was found of each row of ``out`` that the ``joins [R, 4]`` int32 name.

    ``found [parts, heads, D]`` and ``found_lse [parts, heads]`` are fp32, ``out [T, heads, D]``, ``lse [T, heads]``;
    all are contiguous. A row of a negative number is left out.
    """
    _, num_heads, head_dim = found.shape
    if len(joins):
        _merge_parts_kernel[(len(joins), num_heads)](
            found,
            found_lse,
            joins,
            out,
            lse,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_PARTS=_PARTS_AT_ONCE,
            BLOCK_DIM=block_of(head_dim),
        )


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


@triton.jit
def _merge_parts_kernel(
    found, found_lse, joins, out, lse,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    join = joins + tl.program_id(0) * _NUM_JOIN_FIELDS
    row, first, step, count = tl.load(join), tl.load(join + 1), tl.load(join + 2), tl.load(join + 3)
    if row < 0:
        return
    head, dims = tl.program_id(1), tl.arange(0, BLOCK_DIM)
    joined = tl.zeros((BLOCK_DIM,), tl.float32)
    total, peak = 0.0, float("-inf")
    for start in range(0, count, BLOCK_PARTS):
        places = start + tl.arange(0, BLOCK_PARTS)
        is_there = places < count
        parts = (first + places * step).to(tl.int64) * NUM_HEADS + head
        lses = tl.load(found_lse + parts, mask=is_there, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lses, 0))
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, decay = tl.exp(lses - reference), tl.exp(peak - reference)
        outs = tl.load(
            found + parts[:, None] * HEAD_DIM + dims[None, :],
            mask=is_there[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        joined = joined * decay + tl.sum(outs * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    target = row.to(tl.int64) * NUM_HEADS + head
    tl.store(lse + target, tl.where(is_empty, float("-inf"), tl.log(total) + peak))
    tl.store(out + target * HEAD_DIM + dims, (joined / total).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


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
