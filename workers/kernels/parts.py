"""Join of the partial results of one attention launch, by the programs that found them.

Each program stores its part and counts itself. The last program of a block of parts joins these, and the last of the
blocks joins the blocks. The last one may differ from launch to launch, but neither the parts joined nor their order
do.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(64)
"""Parts joined at a time, and then all of these blocks: with a GPU's programs, both are few."""
_ROWS_AT_ONCE = 64
"""Rows of the parts joined at once; with many more, registers spill."""

PART_FIELDS = ("part", "num_parts", "first_slot", "slot_step")
"""A part has the slots from ``first_slot + part * slot_step`` on, one for each query."""


class Parts(NamedTuple):
    """Memory for parts and their counters. Launches on one stream may use the same, one after another."""

    found: Tensor
    """``[slots, heads, D]`` fp32, contiguous: a slot for each query of each part."""
    lse: Tensor
    """``[slots, heads]`` fp32, contiguous."""
    arrived: Tensor
    """``[slots, kv heads]`` int32, zeros, which a launch leaves as they were."""


def parts_at_once(block_rows: int) -> int:
    """Return how many parts of ``block_rows`` rows a program joins at once."""
    return max(_ROWS_AT_ONCE // block_rows, 1)


@triton.jit
def leave(
    out, lse, parts, parts_lse, arrived, part_fields, first_row, num_queries, kv_head, found, found_lse,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, JOINED_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Store a program's result: to rows of ``out`` from ``first_row`` on, or, of several parts, to slots.

    The last program of all parts then joins them and writes the rows.
    """
    part, num_parts = tl.load(part_fields), tl.load(part_fields + 1)
    if num_parts == 1:
        _store(
            out, lse, first_row, found, found_lse, num_queries, kv_head,
            GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
    elif BLOCK_PARTS > 0:
        first_slot, slot_step = tl.load(part_fields + 2), tl.load(part_fields + 3)
        _store(
            parts, parts_lse, first_slot + part * slot_step, found, found_lse, num_queries, kv_head,
            GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
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
    if _is_last(counters + first_of_block * num_counters, count):
        joined, joined_lse = _join(
            parts, parts_lse, first_of_block, slot_step, count, num_queries, kv_head,
            GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_PARTS, BLOCK_ROWS, BLOCK_DIM,
        )  # fmt: skip
        if num_parts <= _BLOCK:
            _store(
                out, lse, first_row, joined, joined_lse, num_queries, kv_head,
                GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
            )  # fmt: skip
        else:
            # Other threads of this program may still read the slots.
            tl.debug_barrier()
            _store(
                parts, parts_lse, first_of_block, joined, joined_lse, num_queries, kv_head,
                GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
            )  # fmt: skip
            num_blocks = tl.cdiv(num_parts, _BLOCK)
            # The second part begins no block, so its counter is free.
            if _is_last(counters + (first_slot + slot_step) * num_counters, num_blocks):
                joined, joined_lse = _join(
                    parts, parts_lse, first_slot, slot_step * _BLOCK, num_blocks, num_queries, kv_head,
                    GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_PARTS, BLOCK_ROWS, BLOCK_DIM,
                )  # fmt: skip
                _store(
                    out, lse, first_row, joined, joined_lse, num_queries, kv_head,
                    GROUPS, NUM_HEADS, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM,
                )  # fmt: skip


@triton.jit
def _is_last(counter, count):
    """Return whether ``count`` programs have arrived; this one then sees what each wrote before."""
    # One thread counts, and publishes the writes of all.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _join(
    found, found_lse, first_slot, slot_step, count, num_queries, kv_head,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Join ``count`` parts: ``[BLOCK_ROWS, BLOCK_DIM]`` and lse of all their queries."""
    parts, rows, dims = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    places = rows // GROUPS * NUM_HEADS + kv_head * GROUPS + rows % GROUPS
    joined = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    for start in range(0, count, BLOCK_PARTS):
        slots = (first_slot + (start + parts) * slot_step).to(tl.int64)
        heads = slots[:, None] * NUM_HEADS + places[None, :]
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
    out, lse, first_row, found, found_lse, num_queries, kv_head,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    rows, dims = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    is_row = rows < num_queries * GROUPS
    places = (first_row + rows // GROUPS).to(tl.int64) * NUM_HEADS + kv_head * GROUPS + rows % GROUPS
    tl.store(lse + places, found_lse, mask=is_row)
    tl.store(
        out + places[:, None] * HEAD_DIM + dims[None, :],
        found.to(out.dtype.element_ty),
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
    )
