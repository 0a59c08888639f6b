"""Scores of an indexer's keys, the keys with the best scores, and their places in memory.

The reference implementation is workers.attention.selection.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.attention import PROCESSORS, SEGMENT_FIELDS
from workers.kernels.launch import block_of, operand_type

_MOST_SCORE = tl.constexpr(torch.finfo(torch.float32).max)
_DIGIT_BITS = tl.constexpr(8)
_NUM_DIGITS = tl.constexpr(1 << 8)
_NUM_SEGMENT_FIELDS = tl.constexpr(len(SEGMENT_FIELDS))
_STOP, _AHEAD = tl.constexpr(SEGMENT_FIELDS.index("stop")), tl.constexpr(SEGMENT_FIELDS.index("ahead"))
_SPAN = 1 << 14
"""Number of scores from which one program chooses the best, unless there are not many more than it chooses."""
_CHOICE_BLOCK = 2048
_LEAST_PART = 8
"""Minimum number of selected keys in a part."""
_TOKEN_PROGRAMS = 8 * PROCESSORS
"""Number of programs for scores of tokens, which keep the loads of an H200 in flight."""


class VisibleKeys(NamedTuple):
    """Keys that some queries see: the first ``num_keys`` of the pages whose numbers begin at ``first_pages``."""

    keys: Tensor
    """``[page, 1, slot, dim]``. The elements of a key are adjacent."""
    tables: Tensor
    """Page numbers, int64."""
    first_pages: Tensor
    """``[queries]`` int32: index of each query's first page in ``tables``."""
    num_keys: Tensor
    """``[queries]`` int32."""


def score_run(q: Tensor, weights: Tensor, visible: VisibleKeys, scores: Tensor, begin: int = 0) -> None:
    """Write scores of keys from number ``begin`` on into ``scores [queries, keys]`` fp32, where a query sees the key.

    ``q [queries, heads, dim]``; ``weights [queries, heads]`` fp32, with adjacent heads. The queries have equal pages.
    """
    num_queries, num_heads, dim = q.shape
    block_queries, block_keys = (32, 32) if q.itemsize > 2 else (64, 128)
    _score_run_kernel[(triton.cdiv(scores.shape[1], block_keys), triton.cdiv(num_queries, block_queries))](
        *_inputs(q, weights, visible, scores),
        *(num_queries, begin, begin + scores.shape[1], num_heads),
        DIM=dim,
        PAGE_SIZE=visible.keys.shape[2],
        BLOCK_QUERIES=block_queries,
        BLOCK_KEYS=block_keys,
        BLOCK_DIM=block_of(dim, 16),
        OPERAND=operand_type(q.dtype),
        num_warps=4,
        num_stages=3,
    )


def _inputs(q: Tensor, weights: Tensor, visible: VisibleKeys, scores: Tensor) -> tuple[Tensor | int, ...]:
    """Return the tensors of a launch, and their strides."""
    assert q.stride(2) == weights.stride(1) == 1, f"strides {q.stride()} and {weights.stride()}"
    keys = visible.keys
    tensors = q, weights, keys, visible.tables, visible.first_pages, visible.num_keys, scores
    return *tensors, *q.stride()[:2], weights.stride(0), keys.stride(0), keys.stride(2), scores.stride(0)


@triton.jit(
    do_not_specialize=["score_stride", "num_queries", "begin", "end"],
    do_not_specialize_on_alignment=["first_pages", "num_keys", "scores"],
)
def _score_run_kernel(
    q, weights, keys, tables, first_pages, num_keys, scores,
    query_stride, head_stride, weight_stride, page_stride, slot_stride, score_stride,
    num_queries, begin, end, num_heads, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Score a block of keys for a block of queries, one head at a time."""
    columns = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    rows, dims = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_DIM)
    is_row = rows < num_queries
    num_seen = tl.minimum(tl.load(num_keys + rows, mask=is_row, other=0), end)
    most = tl.max(num_seen, 0)
    if begin + tl.program_id(0) * BLOCK_KEYS >= most:
        return
    table = tables + tl.load(first_pages)
    block = _load_keys(keys, table, begin + columns, most, page_stride, slot_stride, DIM, PAGE_SIZE, BLOCK_DIM)
    transposed = tl.trans(block.to(OPERAND))
    total = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), tl.float32)
    queries = q + (rows.to(tl.int64) * query_stride)[:, None] + dims[None, :]
    is_held = is_row[:, None] & (dims < DIM)[None, :]
    for head in range(0, num_heads):
        asked = tl.load(queries + head * head_stride, mask=is_held, other=0.0).to(OPERAND)
        weight = tl.load(weights + rows.to(tl.int64) * weight_stride + head, mask=is_row, other=0.0)
        total += _relu(tl.dot(asked, transposed, input_precision="ieee")) * weight[:, None]
    is_seen = is_row[:, None] & (begin + columns[None, :] < num_seen[:, None])
    tl.store(scores + (rows.to(tl.int64) * score_stride)[:, None] + columns[None, :], _finite(total), mask=is_seen)


def score_tokens(q: Tensor, weights: Tensor, visible: VisibleKeys, scores: Tensor, begin: int = 0) -> None:
    """Write scores like ``score_run``, of few queries, which may have different pages."""
    num_queries, num_heads, dim = q.shape
    block_keys = 32 if q.itemsize > 2 else 128
    num_programs = min(triton.cdiv(scores.shape[1], block_keys), triton.cdiv(_TOKEN_PROGRAMS, num_queries))
    _score_tokens_kernel[(num_programs, num_queries)](
        *_inputs(q, weights, visible, scores),
        *(begin, begin + scores.shape[1]),
        NUM_HEADS=num_heads,
        DIM=dim,
        PAGE_SIZE=visible.keys.shape[2],
        BLOCK_HEADS=block_of(num_heads, 16),
        BLOCK_KEYS=block_keys,
        BLOCK_DIM=block_of(dim, 16),
        OPERAND=operand_type(q.dtype),
        num_warps=4,
        num_stages=3,
    )


@triton.jit(
    do_not_specialize=["score_stride", "begin", "end"],
    do_not_specialize_on_alignment=["first_pages", "num_keys", "scores"],
)
def _score_tokens_kernel(
    q, weights, keys, tables, first_pages, num_keys, scores,
    query_stride, head_stride, weight_stride, page_stride, slot_stride, score_stride, begin, end,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Score some of the keys for one query, all heads at a time."""
    row = tl.program_id(1).to(tl.int64)
    heads, dims = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    is_head, stop = heads < NUM_HEADS, tl.minimum(tl.load(num_keys + row), end)
    table = tables + tl.load(first_pages + row)
    places = q + row * query_stride + heads[:, None] * head_stride + dims[None, :]
    asked = tl.load(places, mask=is_head[:, None] & (dims < DIM)[None, :], other=0.0).to(OPERAND)
    weight = tl.load(weights + row * weight_stride + heads, mask=is_head, other=0.0)
    for start in range(begin + tl.program_id(0) * BLOCK_KEYS, stop, tl.num_programs(0) * BLOCK_KEYS):
        numbers = start + tl.arange(0, BLOCK_KEYS)
        block = _load_keys(keys, table, numbers, stop, page_stride, slot_stride, DIM, PAGE_SIZE, BLOCK_DIM)
        products = _relu(tl.dot(asked, tl.trans(block.to(OPERAND)), input_precision="ieee"))
        total = tl.sum(products * weight[:, None], 0)
        tl.store(scores + row * score_stride + numbers - begin, _finite(total), mask=numbers < stop)


@triton.jit
def _load_keys(
    keys, table, numbers, stop, page_stride, slot_stride,
    DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    dims, is_there = tl.arange(0, BLOCK_DIM), numbers < stop
    pages = tl.load(table + numbers // PAGE_SIZE, mask=is_there, other=0)
    rows = pages * page_stride + (numbers % PAGE_SIZE).to(tl.int64) * slot_stride
    return tl.load(keys + rows[:, None] + dims[None, :], mask=is_there[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite(scores):
    """Replace infinite scores and NaN, which would make the number of best keys ambiguous, and -0 by 0."""
    scores = tl.where(scores != scores, -_MOST_SCORE, tl.minimum(tl.maximum(scores, -_MOST_SCORE), _MOST_SCORE))
    return tl.where(scores == 0.0, 0.0, scores)


def choose(scores: Tensor, counts: Tensor, top_k: int, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` best of each row's first ``counts`` scores, and their numbers, ``[rows, top_k]``.

    ``scores [rows, n]`` fp32 are neither NaN nor -0; ``counts [rows]`` int32. Of equal scores, the first ones are best.
    The order is that of the columns. ``numbers [rows, n]`` int32 are the columns' numbers, by default 0 to n - 1.
    Missing scores are -inf, with number -1. Long rows are divided among programs, whose choices are chosen from again.
    """
    span = max(_SPAN, 4 * block_of(top_k))
    num_rows, width = scores.shape
    num_parts = max(triton.cdiv(width, span), 1)
    best = scores.new_empty(num_rows, num_parts * top_k)
    chosen = torch.empty(best.shape, dtype=torch.int32, device=scores.device)
    if num_rows:
        _choose_kernel[(num_parts, num_rows)](
            *(scores, numbers, counts, best, chosen, scores.stride(0), best.stride(0), span, top_k),
            BLOCK=_CHOICE_BLOCK,
            num_warps=8,
        )
    if num_parts == 1:
        return best, chosen
    return choose(best, torch.full_like(counts, best.shape[1]), top_k, chosen)


@triton.jit(
    do_not_specialize=["score_stride", "best_stride", "span", "top_k"],
    do_not_specialize_on_alignment=["scores", "counts"],
)
def _choose_kernel(
    scores, numbers, counts, best, chosen, score_stride, best_stride, span, top_k, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the last chosen score, digit by digit, then copy all better ones and the first equal ones."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.maximum(tl.load(counts + row) - part * span, 0), span)
    scores += row * score_stride + part * span
    best += row * best_stride + part * top_k
    chosen += row * best_stride + part * top_k
    num_chosen = tl.minimum(count, top_k)
    last, num_left = _last_chosen(scores, count, num_chosen, BLOCK)

    num_stored, num_tied = 0, 0
    for start in range(0, count, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = tl.load(scores + columns, mask=columns < count, other=0.0)
        rank = _rank(score)
        is_tied = (rank == last) & (columns < count)
        is_first = is_tied & (num_tied + tl.cumsum(is_tied.to(tl.int32), 0) <= num_left)
        is_chosen = ((rank > last) & (columns < count)) | is_first
        targets = num_stored + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        number = part * span + columns
        if numbers is not None:
            number = tl.load(numbers + row * score_stride + part * span + columns, mask=is_chosen, other=0)
        tl.store(best + targets, score, mask=is_chosen)
        tl.store(chosen + targets, number, mask=is_chosen)
        num_stored += tl.sum(is_chosen.to(tl.int32), 0)
        num_tied += tl.sum(is_tied.to(tl.int32), 0)
    for start in range(num_chosen, top_k, BLOCK):
        targets = start + tl.arange(0, BLOCK)
        tl.store(best + targets, float("-inf"), mask=targets < top_k)
        tl.store(chosen + targets, -1, mask=targets < top_k)


@triton.jit
def _last_chosen(scores, count, num_chosen, BLOCK: tl.constexpr):
    """Return the rank of the last of ``num_chosen`` best scores, and how many scores of that rank are chosen."""
    last, num_left = tl.zeros((), tl.uint32), num_chosen
    digits = tl.arange(0, _NUM_DIGITS)
    for step in tl.static_range(1, 5):
        shift = 32 - step * _DIGIT_BITS
        found = tl.zeros((_NUM_DIGITS,), tl.int32)
        for start in range(0, count, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            rank = _rank(tl.load(scores + columns, mask=columns < count, other=0.0))
            is_counted = columns < count
            if step > 1:
                is_counted = is_counted & ((rank >> (shift + _DIGIT_BITS)) == (last >> (shift + _DIGIT_BITS)))
            digit = ((rank >> shift) & (_NUM_DIGITS - 1)).to(tl.int32)
            found += tl.histogram(digit, _NUM_DIGITS, mask=is_counted)
        num_above = tl.sum(found, 0) - tl.cumsum(found, 0)
        is_last = (num_above < num_left) & (num_above + found >= num_left)
        last = last | (tl.sum(tl.where(is_last, digits, 0), 0).to(tl.uint32) << shift)
        num_left -= tl.sum(tl.where(is_last, num_above, 0), 0)
    return last, num_left


@triton.jit
def _rank(scores):
    """Return integers that sort like the scores."""
    bits = scores.to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000)


def locate(selected: Tensor, visible: VisibleKeys, unit: int, places: Tensor, segments: Tensor, part_len: int) -> None:
    """Write the places of ``selected`` keys, and where each segment ends.

    ``selected [queries, n]`` int32 are numbers of keys, followed by -1; ``places [queries, n]`` int64 are counted in
    ``unit`` elements from the start of the keys. ``segments [queries * parts, 6]`` int32 are those of the attention
    kernel. Each has ``part_len`` of a query's keys, or fewer.
    """
    num_queries, num_keys = selected.shape
    if num_queries:
        num_parts, keys = len(segments) // num_queries, visible.keys
        assert num_parts <= triton.cdiv(num_keys, _LEAST_PART), f"{num_parts} parts of {num_keys} keys"
        _locate_kernel[(num_queries,)](
            *(selected, visible.tables, visible.first_pages, places, segments),
            *(selected.stride(0), keys.stride(0) // unit, keys.stride(2) // unit, num_keys, num_parts, part_len),
            PAGE_SIZE=keys.shape[2],
            BLOCK=min(_CHOICE_BLOCK, block_of(num_keys)),
            BLOCK_PARTS=block_of(triton.cdiv(num_keys, _LEAST_PART)),
        )


@triton.jit(do_not_specialize=["num_parts", "part_len"], do_not_specialize_on_alignment=["first_pages"])
def _locate_kernel(
    selected, tables, first_pages, places, segments,
    selected_stride, page_units, slot_units, num_keys, num_parts, part_len,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    table = tables + tl.load(first_pages + row)
    count = 0
    for start in range(0, num_keys, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        numbers = tl.load(selected + row * selected_stride + columns, mask=columns < num_keys, other=-1)
        is_key = numbers >= 0
        pages = tl.load(table + numbers // PAGE_SIZE, mask=is_key, other=0)
        place = pages * page_units + (numbers % PAGE_SIZE).to(tl.int64) * slot_units
        tl.store(places + row * num_keys + columns, place, mask=is_key)
        count += tl.sum(is_key.to(tl.int32), 0)
    parts = tl.arange(0, BLOCK_PARTS)
    fields = segments + (row * num_parts + parts) * _NUM_SEGMENT_FIELDS
    tl.store(fields + _STOP, tl.minimum((parts + 1) * part_len, count), mask=parts < num_parts)
    tl.store(fields + _AHEAD, count - 1, mask=parts < num_parts)
