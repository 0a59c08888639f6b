"""Join of partial attention results: of complete tensors in a separate launch, or of parts within one launch.

Within one launch, each program stores its part and increments a counter. The last program of a block of parts joins
that block, and the last program of the last block joins the blocks. Which program is last may differ between launches,
but the joined parts and their order are always the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of

_BLOCK = tl.constexpr(64)
"""Number of parts joined into a block before all blocks are joined, which keeps both loops short."""
_ROWS_AT_ONCE = 64
_DIMS_AT_ONCE = tl.constexpr(256)
"""Number of rows, and of their dimensions, that are joined at a time. With many more, registers spill."""

PART_FIELDS = ("part", "num_parts", "first_slot", "slot_step")
"""Fields of a part. Its slots begin at ``first_slot + part * slot_step``, one per query."""


class Parts(NamedTuple):
    """Memory for parts and their counters, which successive launches on one stream may reuse."""

    found: Tensor
    """``[slots, heads, D]`` fp32, contiguous: one slot per query of each part."""
    lse: Tensor
    """``[slots, heads]`` fp32, contiguous."""
    arrived: Tensor
    """``[slots, kv heads]`` int32: zero before and after each launch."""


def unwritten_parts(query: Tensor, value_dim: int, arrived: Tensor) -> Parts:
    """Allocate parts for ``query [T, heads, D]``, with one slot per row of the counters ``arrived``."""
    shape = (len(arrived), query.shape[1])
    found, lse = (query.new_empty(size, dtype=torch.float32) for size in ((*shape, value_dim), shape))
    return Parts(found, lse, arrived)


def parts_at_once(block_rows: int) -> int:
    return max(_ROWS_AT_ONCE // block_rows, 1)


@triton.jit
def store_result(
    out, lse, parts, parts_lse, arrived, part_fields, first_row, num_queries, kv_head, found, found_lse,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, JOINED_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Store a program's result in rows of ``out`` from ``first_row`` on or, if it is one of several parts, in slots.

    The last program of all parts then joins them and writes the rows.
    """
    part, num_parts = tl.load(part_fields), tl.load(part_fields + 1)
    if num_parts == 1:
        _store(
            out, lse, first_row, found, found_lse, num_queries, kv_head, 0,
            GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM, True,
        )  # fmt: skip
    elif BLOCK_PARTS > 0:
        first_slot, slot_step = tl.load(part_fields + 2), tl.load(part_fields + 3)
        _store(
            parts, parts_lse, first_slot + part * slot_step, found, found_lse, num_queries, kv_head, 0,
            GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM, True,
        )  # fmt: skip
        _join_if_last(
            out, lse, parts, parts_lse, arrived, part, num_parts, first_slot, slot_step,
            first_row, num_queries, kv_head,
            GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_PARTS, JOINED_ROWS, BLOCK_DIM,
        )  # fmt: skip


@triton.jit
def _join_if_last(
    out, lse, parts, parts_lse, arrived, part, num_parts, first_slot, slot_step, first_row, num_queries, kv_head,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    counters = arrived + kv_head
    num_counters = NUM_HEADS // GROUPS
    first = part // _BLOCK * _BLOCK
    first_of_block = first_slot + first * slot_step
    count = tl.minimum(num_parts - first, _BLOCK)
    DIMS: tl.constexpr = min(BLOCK_DIM, _DIMS_AT_ONCE)
    if _is_last(counters + first_of_block * num_counters, count):
        for dim in tl.static_range(0, BLOCK_DIM, DIMS):
            joined, joined_lse = _join(
                parts, parts_lse, first_of_block, slot_step, count, num_queries, kv_head, dim,
                GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_PARTS, BLOCK_ROWS, DIMS,
            )  # fmt: skip
            if num_parts <= _BLOCK:
                _store(
                    out, lse, first_row, joined, joined_lse, num_queries, kv_head, dim,
                    GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, DIMS, dim + DIMS == BLOCK_DIM,
                )  # fmt: skip
            else:
                # Other threads of this program may still be reading the slots.
                tl.debug_barrier()
                _store(
                    parts, parts_lse, first_of_block, joined, joined_lse, num_queries, kv_head, dim,
                    GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, DIMS, dim + DIMS == BLOCK_DIM,
                )  # fmt: skip
        if num_parts > _BLOCK:
            num_blocks = tl.cdiv(num_parts, _BLOCK)
            # The second part does not begin a block, so its counter is free.
            if _is_last(counters + (first_slot + slot_step) * num_counters, num_blocks):
                for dim in tl.static_range(0, BLOCK_DIM, DIMS):
                    joined, joined_lse = _join(
                        parts, parts_lse, first_slot, slot_step * _BLOCK, num_blocks, num_queries, kv_head, dim,
                        GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_PARTS, BLOCK_ROWS, DIMS,
                    )  # fmt: skip
                    _store(
                        out, lse, first_row, joined, joined_lse, num_queries, kv_head, dim,
                        GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, DIMS, dim + DIMS == BLOCK_DIM,
                    )  # fmt: skip


@triton.jit
def _is_last(counter, count):
    """Return whether ``count`` programs have arrived. If so, this program sees everything that they wrote."""
    # One thread increments the counter, which publishes the writes of all threads.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _join(
    found, found_lse, first_slot, slot_step, count, num_queries, kv_head, first_dim,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Join BLOCK_DIM dimensions of parts. Return ``[BLOCK_ROWS, BLOCK_DIM]`` and the lse of each row."""
    parts, rows, dims = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_ROWS), first_dim + tl.arange(0, BLOCK_DIM)
    offsets = rows // GROUPS * NUM_HEADS + kv_head * GROUPS + rows % GROUPS
    joined = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    for start in range(0, count, BLOCK_PARTS):
        slots = (first_slot + (start + parts) * slot_step).to(tl.int64)
        heads = slots[:, None] * NUM_HEADS + offsets[None, :]
        is_there = (start + parts < count)[:, None] & (rows < num_queries * GROUPS)[None, :]
        lses = tl.load(found_lse + heads, mask=is_there, other=float("-inf"), cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lses, 0))
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, decay = tl.exp(lses - reference[None, :]), tl.exp(peak - reference)
        outs = tl.load(
            found + heads[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=is_there[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        joined = joined * decay[:, None] + tl.sum(outs * weights[:, :, None], 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    # Not "total > 0", which would hide a NaN.
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    return joined / total[:, None], tl.where(is_empty, float("-inf"), tl.log(total) + peak)


@triton.jit
def _store(
    out, lse, first_row, found, found_lse, num_queries, kv_head, first_dim,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    rows, dims = tl.arange(0, BLOCK_ROWS), first_dim + tl.arange(0, BLOCK_DIM)
    is_row = rows < num_queries * GROUPS
    offsets = (first_row + rows // GROUPS).to(tl.int64) * NUM_HEADS + kv_head * GROUPS + rows % GROUPS
    if HAS_LSE:
        tl.store(lse + offsets, found_lse, mask=is_row)
    tl.store(
        out + offsets[:, None] * HEAD_DIM + dims[None, :],
        found.to(out.dtype.element_ty),
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
    )


def merge_partial(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add a partial to ``out [T, heads, D]`` and ``lse [T, heads]`` in place. See workers.attention.merge."""
    assert out.is_contiguous(), "a merge in place needs contiguous rows"
    block_rows = 8
    if lse.numel():
        _merge_partial_kernel[(triton.cdiv(lse.numel(), block_rows),)](
            out,
            lse,
            other.contiguous(),
            other_lse.contiguous(),
            lse.numel(),
            HEAD_DIM=out.shape[-1],
            BLOCK_ROWS=block_rows,
            BLOCK_DIM=block_of(out.shape[-1]),
        )


@triton.jit(do_not_specialize=["num_rows"])
def _merge_partial_kernel(
    out, lse, other, other_lse, num_rows,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    is_row = rows < num_rows
    is_held = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    own_lse = tl.load(lse + rows, mask=is_row, other=float("-inf"))
    found_lse = tl.load(other_lse + rows, mask=is_row, other=float("-inf"))
    own = tl.load(out + offsets, mask=is_held, other=0.0).to(tl.float32)
    found = tl.load(other + offsets, mask=is_held, other=0.0).to(tl.float32)
    peak = tl.maximum(own_lse, found_lse)
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    own_weight, found_weight = tl.exp(own_lse - reference), tl.exp(found_lse - reference)
    total = own_weight + found_weight
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    joined = (own * own_weight[:, None] + found * found_weight[:, None]) / total[:, None]
    # Other threads of this program may still be reading these rows.
    tl.debug_barrier()
    tl.store(lse + rows, tl.where(is_empty, float("-inf"), tl.log(total) + peak), mask=is_row)
    tl.store(out + offsets, joined.to(out.dtype.element_ty), mask=is_held)
