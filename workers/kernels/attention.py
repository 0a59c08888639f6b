"""Attention of query tiles over segments of keys, in pages or rows, with its log-sum-exp.

One pass with a running maximum (Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691). The G query heads
of a kv head are rows of one tile, so each key is read once for all of them. Values that are the first elements of their
keys are not read again. The reference implementation is workers.attention.torch_backend.
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
PROCESSORS = 132
"""Number of multiprocessors of an H100 or H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Block sizes of a program."""

    heads: int
    """Number of query heads, which share a KV head."""
    rows: int
    """Number of queries times ``heads``, at most."""
    keys: int
    warps: int
    stages: int
    joined_rows: int
    """Number of queries times ``heads`` in each part that the program joins."""
    programs: int = 2 * PROCESSORS
    """Number of programs that fit a GPU."""

    @property
    def queries(self) -> int:
        return self.rows // self.heads

    def programs_for(self, num_shares: int) -> int:
        """Return the number of programs for each share of the query heads."""
        return max(self.programs // num_shares, 1)


def blocks_for(
    num_queries: int, groups: int, *, head_dim: int, value_dim: int, itemsize: int, page_size: int
) -> Blocks:
    """Return block sizes for tiles of up to ``num_queries`` queries with ``groups`` heads per KV head.

    Page size 0 means that keys are in rows.
    """
    is_wide, is_large, is_fp32 = head_dim > 256, value_dim > 128, itemsize > 2
    most_rows = (16 if is_wide else 32) if is_fp32 else (64 if is_large else 128)
    heads = next(heads for heads in range(min(groups, most_rows), 0, -1) if groups % heads == 0)
    rows = min(num_queries * heads, most_rows)
    # Products of few wide rows would not overlap with loads.
    block_rows = most_rows if is_wide else block_of(rows, 16)
    sizes = {"heads": heads, "rows": block_rows, "joined_rows": block_of(rows), "warps": 8}
    if is_fp32:
        return Blocks(**sizes, keys=32 if head_dim == value_dim else 16, stages=2)
    if is_wide:
        # Shared memory holds one program. With a page number per key, 64 keys would spill.
        keys = MOST_BLOCK_KEYS if page_size % MOST_BLOCK_KEYS == 0 else 32
        return Blocks(**sizes, keys=keys, stages=2, programs=PROCESSORS)
    if rows <= 16 and not is_large:
        sizes["warps"] = 4
    # The page number is loaded before the page, so together they take two of the stages.
    return Blocks(**sizes, keys=32 if is_large else MOST_BLOCK_KEYS, stages=5 if page_size and head_dim <= 128 else 3)


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
    if not len(tiles):
        return
    num_shares, head_dim, value_dim = query.shape[1] // blocks.heads, query.shape[2], value.shape[3]
    # Wide keys are multiplied in two blocks, since 576 elements would take one of 1,024.
    key_dim = min(value_dim, head_dim)
    tensors = (query, key, value, out, lse, *(parts or (None, None, None)), tiles, segments, tables)
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3])
    # Each share of a KV head's query heads gets programs of its own.
    _attend_kernel[(len(tiles), num_shares)](
        *tensors,
        *strides,
        math.log2(math.e) * scale,
        GROUPS=blocks.heads,
        SHARES=num_shares // key.shape[1],
        NUM_HEADS=query.shape[1],
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        KEY_DIM=key_dim,
        ARE_IN_KEYS=are_in_keys(key, value),
        WINDOW=window or 0,
        PAGE_SIZE=page_size,
        BLOCK_ROWS=blocks.rows,
        BLOCK_KEYS=blocks.keys,
        BLOCK_DIM=block_of(key_dim, 16),
        BLOCK_REST_DIM=block_of(head_dim - key_dim, 16) if key_dim < head_dim else 0,
        BLOCK_VALUE_DIM=block_of(value_dim, 16),
        BLOCK_PARTS=parts_at_once(blocks.joined_rows) if parts else 0,
        JOINED_ROWS=blocks.joined_rows if parts else 0,
        OPERAND=operand_type(query.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def are_in_keys(key: Tensor, value: Tensor) -> bool:
    """Return whether values are the first elements of their keys."""
    return key.data_ptr() == value.data_ptr() and key.stride() == value.stride()


@triton.jit
def _attend_kernel(
    query, key, value, out, lse, parts, parts_lse, arrived, tiles, segments, tables,
    query_row_stride, query_head_stride, key_page_stride, key_head_stride, key_slot_stride,
    value_page_stride, value_head_stride, value_slot_stride, scale,
    GROUPS: tl.constexpr, SHARES: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr,
    ARE_IN_KEYS: tl.constexpr, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_REST_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, JOINED_ROWS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * _NUM_TILE_FIELDS
    share = tl.program_id(1)
    first_row, num_queries, first_index = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if num_queries == 0:
        return
    first_segment, num_segments = tl.load(tile + 3), tl.load(tile + 4)

    rows = tl.arange(0, BLOCK_ROWS)
    queries, heads = rows // GROUPS, share * GROUPS + rows % GROUPS
    is_query = queries < num_queries
    query_rows = query + (first_row + queries) * query_row_stride + heads * query_head_stride
    asked = _load_queries(query_rows, is_query, 0, KEY_DIM, BLOCK_DIM, OPERAND)
    asked_rest = asked
    if BLOCK_REST_DIM > 0:
        asked_rest = _load_queries(query_rows, is_query, KEY_DIM, HEAD_DIM, BLOCK_REST_DIM, OPERAND)
    indices, last_index = first_index + queries, first_index + num_queries - 1

    found = tl.zeros((BLOCK_ROWS, BLOCK_VALUE_DIM), tl.float32)
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    kv_head = (share // SHARES).to(tl.int64)
    key += kv_head * key_head_stride
    value += kv_head * value_head_stride
    for at in range(first_segment, first_segment + num_segments):
        table, first_key, first_seen, begin, whole, stop, last_seen = _load_segment(
            segments + at * _NUM_SEGMENT_FIELDS, tables, first_index, last_index, indices, WINDOW, BLOCK_KEYS
        )
        for start in range(begin, begin + whole, BLOCK_KEYS):
            found, peak, total = _attend_block(
                asked, asked_rest, key, value, found, peak, total, table, first_key, first_seen, start, stop, last_seen,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, scale,
                HEAD_DIM, VALUE_DIM, KEY_DIM, ARE_IN_KEYS, WINDOW, PAGE_SIZE,
                BLOCK_KEYS, BLOCK_DIM, BLOCK_REST_DIM, BLOCK_VALUE_DIM, OPERAND, False,
            )  # fmt: skip
        for start in range(begin + whole, stop, BLOCK_KEYS):
            found, peak, total = _attend_block(
                asked, asked_rest, key, value, found, peak, total, table, first_key, first_seen, start, stop, last_seen,
                key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, scale,
                HEAD_DIM, VALUE_DIM, KEY_DIM, ARE_IN_KEYS, WINDOW, PAGE_SIZE,
                BLOCK_KEYS, BLOCK_DIM, BLOCK_REST_DIM, BLOCK_VALUE_DIM, OPERAND, True,
            )  # fmt: skip

    found, found_lse = _normalize(found, peak, total)
    store_result(
        out, lse, parts, parts_lse, arrived, tile + 5, first_row, num_queries, share, found, found_lse,
        GROUPS, NUM_HEADS, VALUE_DIM, BLOCK_ROWS, BLOCK_PARTS, JOINED_ROWS, BLOCK_VALUE_DIM,
    )  # fmt: skip


@triton.jit
def _normalize(found, peak, total):
    """Return attention and the log of the sum, given sums that are scaled by ``2**-peak``."""
    # Not "total > 0", which would hide a NaN.
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    return found / total[:, None], tl.where(is_empty, float("-inf"), (tl.log2(total) + peak) * _LN_2)


@triton.jit
def _load_queries(
    query_rows, is_query, first: tl.constexpr, stop: tl.constexpr, BLOCK_DIM: tl.constexpr, OPERAND: tl.constexpr
):  # fmt: skip
    dims = first + tl.arange(0, BLOCK_DIM)
    is_held = is_query[:, None] & (dims < stop)[None, :]
    return tl.load(query_rows[:, None] + dims[None, :], mask=is_held, other=0.0).to(OPERAND)


@triton.jit
def _load_segment(
    segment, tables, first_index, last_index, indices, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Load a segment: its table and first key, the keys that a tile sees, and the last key that each query sees.

    Without a window, ``first_seen`` is 0. With one, the first block may begin before it.
    The first ``whole`` keys from ``begin`` on form full blocks that every query sees, so they need no mask.
    """
    table, first_key = tables + tl.load(segment), tl.load(segment + 1)
    begin, stop = tl.load(segment + 2), tl.load(segment + 3)
    ahead, step = tl.load(segment + 4), tl.load(segment + 5)
    last_seen = ahead + indices * step
    first_seen, whole = 0, 0
    if WINDOW > 0:
        first_seen = tl.maximum(ahead + first_index * step + 1 - WINDOW, 0)
        begin = tl.maximum(begin, first_seen // BLOCK_KEYS * BLOCK_KEYS)
    else:
        whole = tl.maximum(tl.minimum(ahead + first_index * step + 1, stop) - begin, 0) // BLOCK_KEYS * BLOCK_KEYS
    stop = tl.minimum(ahead + last_index * step + 1, stop)
    return table, first_key, first_seen, begin, whole, stop, last_seen


@triton.jit
def _attend_block(
    asked, asked_rest, key, value, found, peak, total, table, first_key, first_seen, start, stop, last_seen,
    key_page_stride, key_slot_stride, value_page_stride, value_slot_stride, scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, ARE_IN_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_REST_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    OPERAND: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to a tile's sums, which are scaled by ``2**-peak``."""
    keys = start + tl.arange(0, BLOCK_KEYS)
    is_there = keys < stop
    if WINDOW > 0:
        is_there = is_there & (keys >= first_seen)  # pages before it may be another request's by now
    if PAGE_SIZE == 0:
        pages, slots = tl.zeros((BLOCK_KEYS,), tl.int64), first_key + keys
    elif PAGE_SIZE % BLOCK_KEYS == 0:
        pages, slots = tl.load(table + start // PAGE_SIZE), keys % PAGE_SIZE
    else:
        pages, slots = tl.load(table + keys // PAGE_SIZE, mask=is_there, other=0), keys % PAGE_SIZE
    slots = slots.to(tl.int64)
    key_rows = pages * key_page_stride + slots * key_slot_stride
    key_block = _load_block(key, key_rows, is_there, KEY_DIM, BLOCK_DIM, IS_MASKED)
    scores = tl.dot(asked, tl.trans(key_block.to(OPERAND)), input_precision="ieee")
    if BLOCK_REST_DIM > 0:
        rest_block = _load_block(key + KEY_DIM, key_rows, is_there, HEAD_DIM - KEY_DIM, BLOCK_REST_DIM, IS_MASKED)
        scores = tl.dot(asked_rest, tl.trans(rest_block.to(OPERAND)), scores, input_precision="ieee")
    scores *= scale
    if IS_MASKED:
        seen = (keys[None, :] <= last_seen[:, None]) & (keys < stop)[None, :]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > last_seen[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(peak - reference)
    value_block = key_block
    if not ARE_IN_KEYS:
        value_rows = pages * value_page_stride + slots * value_slot_stride
        value_block = _load_block(value, value_rows, is_there, VALUE_DIM, BLOCK_VALUE_DIM, IS_MASKED)
    rounded = weights.to(value_block.dtype).to(OPERAND)
    found = tl.dot(rounded, value_block.to(OPERAND), found * decay[:, None], input_precision="ieee")
    return found, new_peak, total * decay + tl.sum(weights, 1)


@triton.jit
def _load_block(
    memory, offsets, is_there, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, IS_MASKED: tl.constexpr
):  # fmt: skip
    """Load rows of ``memory``. Absent rows are read as zeros, since their memory may hold NaN."""
    dims = tl.arange(0, BLOCK_DIM)
    elements = memory + offsets[:, None] + dims[None, :]
    if IS_MASKED:
        block = tl.load(elements, mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_DIM:
        block = tl.load(elements)
    else:
        block = tl.load(elements, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return block
