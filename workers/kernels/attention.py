"""Attention of query tiles over segments of keys, in pages or rows, with its log-sum-exp.

One pass with a running maximum (Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691). The G query heads
of a kv head are rows of one tile, so each key is read once for all of them. The reference implementation is
workers.attention.torch_backend.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of, operand_type
from workers.kernels.partials import PART_FIELDS, Parts, parts_at_once, store_result

TILE_FIELDS = ("first_row", "num_queries", "first_index", "first_segment", "num_segments", *PART_FIELDS)
"""Fields of a program's tile: its rows of ``query`` and ``out``, starting with query ``first_index`` of its run; its
segments; and the slots for its result if these segments cover only some of the keys. A tile without queries does
nothing.
"""

SEGMENT_FIELDS = ("table", "first_key", "begin", "stop", "ahead", "step")
"""Fields of a segment with keys ``begin`` to ``stop``. Query i of a run sees keys up to ``ahead + i * step``. Key k is
in page ``tables[table + k / page_size]`` or, without pages, in row ``first_key + k``.
"""

_NUM_TILE_FIELDS = tl.constexpr(len(TILE_FIELDS))
_NUM_SEGMENT_FIELDS = tl.constexpr(len(SEGMENT_FIELDS))
_LN_2 = tl.constexpr(math.log(2.0))


MOST_BLOCK_KEYS = 64
"""Maximum number of keys per block. The first key of a paged segment has an index that is a multiple of this number."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes of a program."""

    rows: int
    """Number of queries times G."""
    keys: int
    warps: int
    stages: int
    joined_rows: int
    """Number of queries times G in each part that the program joins."""


def blocks_for(rows: int, head_dim: int, itemsize: int, page_size: int) -> Blocks:
    """Return block sizes for tiles of up to ``rows`` rows. Page size 0 means that keys are in rows."""
    if itemsize > 2:
        most = min(rows, 32)
        return Blocks(block_of(most, 16), 32, 8, 2, block_of(most))
    is_large = head_dim > 128
    most_rows = min(rows, 64 if is_large else 128)
    warps = 4 if rows <= 16 and not is_large else 8
    # The page number is loaded before the page, so together they take two of the stages.
    stages = 5 if page_size and not is_large else 3
    return Blocks(block_of(most_rows, 16), 32 if is_large else MOST_BLOCK_KEYS, warps, stages, block_of(most_rows))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    tiles: Tensor,
    segments: Tensor,
    tables: Tensor,
    page_size: int,
    blocks: Blocks,
    scale: float,
    window: int | None = None,
    parts: Parts | None = None,
) -> None:
    """Compute attention of ``query [T, H * G, D]`` over ``key [page, H, slot, D]`` and ``value [page, H, slot, V]``.

    For page size 0, keys and values are ``[1, H, row, ...]``. Writes ``out [T, H * G, V]`` and ``lse [T, H * G]`` fp32,
    both contiguous, in the rows of ``tiles``. ``tiles [n, 9]`` and ``segments [m, 6]`` are int32, ``tables`` int64. The
    elements of a head are adjacent. With a ``window``, a query sees only the last ``window`` of its segment's visible
    keys. Without ``parts``, every tile has all keys of its queries.
    """
    num_kv_heads, head_dim, value_dim = key.shape[1], query.shape[2], value.shape[3]
    if not len(tiles):
        return
    tensors = (query, key, value, out, lse, *(parts or (None, None, None)), tiles, segments, tables)
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3])
    _attend_kernel[(len(tiles), num_kv_heads)](
        *tensors,
        *strides,
        math.log2(math.e) * scale,
        GROUPS=query.shape[1] // num_kv_heads,
        NUM_HEADS=query.shape[1],
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        WINDOW=window or 0,
        PAGE_SIZE=page_size,
        BLOCK_ROWS=blocks.rows,
        BLOCK_KEYS=blocks.keys,
        BLOCK_DIM=block_of(head_dim, 16),
        BLOCK_VALUE_DIM=block_of(value_dim, 16),
        BLOCK_PARTS=parts_at_once(blocks.joined_rows) if parts else 0,
        JOINED_ROWS=blocks.joined_rows if parts else 0,
        OPERAND=operand_type(query.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


@triton.jit
def _attend_kernel(
    query, key, value, out, lse, parts, parts_lse, arrived, tiles, segments, tables,
    query_row_stride, query_head_stride, key_page_stride, key_head_stride, key_slot_stride,
    value_page_stride, value_head_stride, value_slot_stride, scale,
    GROUPS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, JOINED_ROWS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * _NUM_TILE_FIELDS
    kv_head = tl.program_id(1)
    first_row, num_queries, first_index = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if num_queries == 0:
        return
    first_segment, num_segments = tl.load(tile + 3), tl.load(tile + 4)

    rows, dims = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    queries, heads = rows // GROUPS, kv_head * GROUPS + rows % GROUPS
    is_held = (queries < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = (first_row + queries) * query_row_stride + heads * query_head_stride
    asked = tl.load(query + query_rows[:, None] + dims[None, :], mask=is_held, other=0.0).to(OPERAND)
    indices = first_index + queries
    last_index = first_index + num_queries - 1

    found = tl.zeros((BLOCK_ROWS, BLOCK_VALUE_DIM), tl.float32)
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    key += kv_head.to(tl.int64) * key_head_stride
    value += kv_head.to(tl.int64) * value_head_stride
    for at in range(first_segment, first_segment + num_segments):
        table, first_key, begin, whole, stop, last_seen = _load_segment(
            segments + at * _NUM_SEGMENT_FIELDS, tables, first_index, last_index, indices, WINDOW, BLOCK_KEYS
        )
        for start in range(begin, begin + whole, BLOCK_KEYS):
            found, peak, total = _attend_block(
                asked, key, value, found, peak, total, table, first_key, start, stop, last_seen,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, scale, dims,
                HEAD_DIM, VALUE_DIM, WINDOW, PAGE_SIZE, BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE_DIM, OPERAND, False,
            )  # fmt: skip
        for start in range(begin + whole, stop, BLOCK_KEYS):
            found, peak, total = _attend_block(
                asked, key, value, found, peak, total, table, first_key, start, stop, last_seen,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, scale, dims,
                HEAD_DIM, VALUE_DIM, WINDOW, PAGE_SIZE, BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE_DIM, OPERAND, True,
            )  # fmt: skip

    # Not "total > 0", which would hide a NaN.
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    found = found / total[:, None]
    found_lse = tl.where(is_empty, float("-inf"), (tl.log2(total) + peak) * _LN_2)
    store_result(
        out, lse, parts, parts_lse, arrived, tile + 5, first_row, num_queries, kv_head, found, found_lse,
        GROUPS, NUM_HEADS, VALUE_DIM, BLOCK_ROWS, BLOCK_PARTS, JOINED_ROWS, BLOCK_VALUE_DIM,
    )  # fmt: skip


@triton.jit
def _load_segment(
    segment, tables, first_index, last_index, indices, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Load a segment: its table and first key, the keys that a tile sees, and the last key that each query sees.

    The first ``whole`` keys from ``begin`` on form full blocks that every query sees, so they need no mask.
    """
    table, first_key = tables + tl.load(segment), tl.load(segment + 1)
    begin, stop = tl.load(segment + 2), tl.load(segment + 3)
    ahead, step = tl.load(segment + 4), tl.load(segment + 5)
    last_seen = ahead + indices * step
    whole = 0
    if WINDOW > 0:
        first_seen = tl.maximum(ahead + first_index * step + 1 - WINDOW, 0)
        begin = tl.maximum(begin, first_seen // BLOCK_KEYS * BLOCK_KEYS)
    else:
        whole = tl.maximum(tl.minimum(ahead + first_index * step + 1, stop) - begin, 0) // BLOCK_KEYS * BLOCK_KEYS
    stop = tl.minimum(ahead + last_index * step + 1, stop)
    return table, first_key, begin, whole, stop, last_seen


@triton.jit
def _attend_block(
    asked, key, value, found, peak, total, table, first_key, start, stop, last_seen,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, scale, dims,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    OPERAND: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to a tile's sums, which are scaled by ``2**-peak``."""
    keys = start + tl.arange(0, BLOCK_KEYS)
    if PAGE_SIZE == 0:
        pages, slots = tl.zeros((BLOCK_KEYS,), tl.int64), first_key + keys
    elif PAGE_SIZE % BLOCK_KEYS == 0:
        pages, slots = tl.load(table + start // PAGE_SIZE), keys % PAGE_SIZE
    else:
        pages, slots = tl.load(table + keys // PAGE_SIZE, mask=keys < stop, other=0), keys % PAGE_SIZE
    slots = slots.to(tl.int64)
    key_block = _load_block(
        key, pages * key_page_stride + slots * key_slot_stride, keys < stop, dims, HEAD_DIM, BLOCK_DIM, IS_MASKED
    )
    scores = tl.dot(asked, tl.trans(key_block.to(OPERAND)), input_precision="ieee") * scale
    if IS_MASKED:
        seen = (keys[None, :] <= last_seen[:, None]) & (keys < stop)[None, :]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > last_seen[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(peak - reference)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    value_rows = pages * value_page_stride + slots * value_slot_stride
    value_block = _load_block(value, value_rows, keys < stop, value_dims, VALUE_DIM, BLOCK_VALUE_DIM, IS_MASKED)
    rounded = weights.to(value_block.dtype).to(OPERAND)
    found = tl.dot(rounded, value_block.to(OPERAND), found * decay[:, None], input_precision="ieee")
    return found, new_peak, total * decay + tl.sum(weights, 1)


@triton.jit
def _load_block(
    memory, offsets, is_there, dims,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Load rows of ``memory``. Absent rows are read as zeros, since their memory may hold NaN."""
    elements = memory + offsets[:, None] + dims[None, :]
    if IS_MASKED:
        block = tl.load(elements, mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_DIM:
        block = tl.load(elements)
    else:
        block = tl.load(elements, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return block
