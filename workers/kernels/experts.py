"""Experts on the GPU: expert choice, sorting rows by expert, grouped products and weighted sums.

The reference implementations are in workers.layers.feed_forward and workers.expert_parallel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.device import device_of
from workers.kernels.launch import block_of, operand_type

TILE_FIELDS = 3
_CHOICE_BLOCK = 512
_BLOCK_COLS = 1024


def choose_experts(
    logits: Tensor, num_chosen: int, counted: Tensor | None, *, sum_to_one: bool
) -> tuple[Tensor, Tensor]:
    """Choose the ``num_chosen`` most likely experts by ``logits [tokens, experts]``.

    Returns expert numbers (int32) and weights (fp32), each ``[tokens, k]``. Ties go to the lowest number. Tokens whose
    ``counted``, bool ``[tokens, 1]``, is False get -1.
    """
    assert logits.is_contiguous(), f"strides {logits.stride()}"
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    if num_tokens:
        tensors = (logits, counted, weights, experts)
        _choose_kernel[(num_tokens,)](
            *tensors,
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            SUM_TO_ONE=sum_to_one,
            BLOCK=block_of(num_experts),
            BLOCK_CHOSEN=block_of(num_chosen),
            num_warps=1,
        )
    return experts, weights


@triton.jit
def _choose_kernel(
    logits, counted, weights, experts,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, SUM_TO_ONE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    each, choices = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    row = tl.load(logits + token * NUM_EXPERTS + each, mask=each < NUM_EXPERTS, other=-float("inf")).to(tl.float32)
    likelihoods = tl.exp(row - tl.max(row, 0))
    likelihoods = tl.where(each < NUM_EXPERTS, likelihoods / tl.sum(likelihoods, 0), -1.0)
    of_chosen, found = tl.zeros((BLOCK_CHOSEN,), tl.float32), tl.full((BLOCK_CHOSEN,), -1, tl.int32)
    is_counted = True
    if counted is not None:
        is_counted = tl.load(counted + token) != 0
    for choice in range(0, NUM_CHOSEN):
        best = tl.max(likelihoods, 0)
        # If all are NaN, take the last expert, so that the number stays in bounds.
        expert = tl.minimum(tl.min(tl.where(likelihoods == best, each, BLOCK), 0), NUM_EXPERTS - 1)
        of_chosen = tl.where(choices == choice, best, of_chosen)
        found = tl.where((choices == choice) & is_counted, expert, found)
        likelihoods = tl.where(each == expert, -1.0, likelihoods)
    if SUM_TO_ONE:
        of_chosen = of_chosen / tl.sum(of_chosen, 0)
    targets = token * NUM_CHOSEN + choices
    tl.store(weights + targets, of_chosen, mask=choices < NUM_CHOSEN)
    tl.store(experts + targets, found, mask=choices < NUM_CHOSEN)


_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


class RowTiles(NamedTuple):
    """Assignment of rows to matrices."""

    tiles: Tensor
    """``[n, 3]`` int32: (group, first row, end of the group's rows). Rows of group -1 are set to zero."""
    block_rows: int
    """Maximum number of rows per tile."""


def block_rows_for(num_rows: int, num_groups: int, itemsize: int) -> int:
    """Return the number of rows per tile: the fastest for the item size, or 16 if groups have few rows."""
    return 16 if num_rows <= 16 * num_groups else 32 if itemsize > 2 else 64


def tiles_of(counts: Sequence[int], rows: Tensor) -> RowTiles:
    """Return tiles for ``rows``, in which the first ``counts[0]`` rows belong to the first matrix, and so on."""
    block_rows = block_rows_for(sum(counts), len(counts), rows.itemsize)
    tiles, begin = [], 0
    for group, count in enumerate(counts):
        tiles += [(group, first, begin + count) for first in range(begin, begin + count, block_rows)]
        begin += count
    on_cpu = torch.tensor(tiles, dtype=torch.int32, device="cpu").view(-1, TILE_FIELDS)
    return RowTiles(device_of(rows).put(on_cpu), block_rows)


def grouped_matmul(x: Tensor, weights: Tensor, tiles: RowTiles, sources: Tensor | None = None) -> Tensor:
    """Multiply each row of ``x [N, K]`` by its tile's matrix in ``weights [E, M, K]``. Return ``[N, M]``.

    With ``sources [rows]`` int32, row i is ``x[sources[i]]``. Every row is in exactly one tile. Tensors are contiguous.
    """
    assert x.is_contiguous(), f"strides {x.stride()}"
    assert weights.is_contiguous(), f"strides {weights.stride()}"
    num_rows = len(x) if sources is None else len(sources)
    out = x.new_empty((num_rows, weights.shape[1]))
    block_cols, block_inner = (32, 32) if x.itemsize > 2 else (128, 64)
    if len(tiles.tiles):
        tensors, sizes = (x, weights, out, tiles.tiles, sources), (out.shape[1], x.shape[1])
        _grouped_matmul_kernel[(triton.cdiv(out.shape[1], block_cols), len(tiles.tiles))](
            *tensors,
            *sizes,
            BLOCK_ROWS=tiles.block_rows,
            BLOCK_COLS=block_cols,
            BLOCK_INNER=block_inner,
            OPERAND=operand_type(x.dtype),
            num_warps=4,
            num_stages=3,
        )
    return out


@triton.jit
def _grouped_matmul_kernel(
    x, weights, out, tiles, sources, num_cols, num_inner,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_INNER: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * _TILE_FIELDS
    group, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first == stop:
        return
    rows = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inner = tl.arange(0, BLOCK_INNER)
    is_row, is_col = rows < stop, cols < num_cols
    of_rows = rows
    if sources is not None:
        of_rows = tl.load(sources + rows, mask=is_row, other=0).to(tl.int64)
    row_places = x + of_rows[:, None] * num_inner
    col_places = weights + (group * num_cols + cols[:, None]) * num_inner
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(0, tl.where(group < 0, 0, num_inner), BLOCK_INNER):
        is_inner = (start + inner < num_inner)[None, :]
        part = tl.load(row_places + start + inner[None, :], mask=is_row[:, None] & is_inner, other=0.0)
        matrix = tl.load(col_places + start + inner[None, :], mask=is_col[:, None] & is_inner, other=0.0)
        total = tl.dot(part.to(OPERAND), tl.trans(matrix.to(OPERAND)), total, input_precision="ieee")
    targets = out + rows[:, None] * num_cols + cols[None, :]
    tl.store(targets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


class ExpertRows(NamedTuple):
    """One row for each choice of a local expert."""

    tokens: Tensor
    """Token of each row, ``[rows]`` int32; token 0 for unused rows at the end."""
    rows: Tensor
    """Row of each choice, ``[tokens, k]`` int32. -1 if the expert is on another rank."""
    tiles: RowTiles
    """Tiles of each expert's rows, followed by the unused rows."""


def expert_rows(experts: Tensor, first: int, loads: Tensor, block_rows: int) -> ExpertRows:
    """Sort by expert those choices in ``experts [tokens, k]`` (int32, contiguous) that are local experts.

    Local experts begin at number ``first``. Adds each expert's row count to ``loads [local experts]`` int64. A token
    may not choose an expert twice. Every expert's program reads all choices, so there should be few of them.
    """
    (num_tokens, num_chosen), num_local = experts.shape, len(loads)
    num_choices = num_tokens * num_chosen
    tokens = torch.zeros(num_choices, dtype=torch.int32, device=experts.device)
    rows = torch.empty_like(experts)
    num_tiles = min(num_choices, num_local + 1 + num_choices // block_rows)
    tiles = torch.empty(num_tiles, TILE_FIELDS, dtype=torch.int32, device=experts.device)
    if num_choices:
        tensors, sizes = (experts, tokens, rows, tiles, loads), (num_choices, num_chosen, num_local, num_tiles)
        _expert_rows_kernel[(num_local + 1,)](
            *tensors, first, *sizes, BLOCK_ROWS=block_rows, NUM_BINS=block_of(num_local + 1), BLOCK=_CHOICE_BLOCK
        )
    return ExpertRows(tokens, rows, RowTiles(tiles, block_rows))


@triton.jit(do_not_specialize=["first", "num_choices", "num_tiles"])
def _expert_rows_kernel(
    experts, tokens, rows, tiles, loads, first, num_choices, num_chosen, num_local, num_tiles,
    BLOCK_ROWS: tl.constexpr, NUM_BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)  # num_local stands for the experts of all other ranks
    counts = tl.zeros((NUM_BINS,), tl.int32)
    for begin in range(0, num_choices, BLOCK):
        counts += tl.histogram(_local(experts, begin, first, num_choices, num_local, BLOCK), NUM_BINS)
    bins = tl.arange(0, NUM_BINS)
    row = tl.sum(tl.where(bins < expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0))
    end = row + tl.sum(tl.where(bins == expert, counts, 0))
    at = row
    for begin in range(0, num_choices, BLOCK):
        choices = begin + tl.arange(0, BLOCK)
        local = _local(experts, begin, first, num_choices, num_local, BLOCK)
        is_own = (local == expert) & (choices < num_choices)
        own_rows = at + tl.cumsum(is_own.to(tl.int32)) - 1
        is_here = is_own & (expert < num_local)
        tl.store(tokens + own_rows, choices // num_chosen, mask=is_here)
        tl.store(rows + choices, tl.where(is_here, own_rows, -1), mask=is_own)
        at += tl.sum(is_own.to(tl.int32))
    is_local = expert < num_local
    if is_local:
        tl.store(loads + expert, tl.load(loads + expert) + (end - row))
    stop = tl.where(is_local, end, num_choices)
    for part in range(0, tl.where(is_local, (stop - row + BLOCK_ROWS - 1) // BLOCK_ROWS, num_tiles - tile)):
        own_tile = tiles + (tile + part) * _TILE_FIELDS
        tl.store(own_tile, tl.where(is_local, expert, -1))
        tl.store(own_tile + 1, tl.minimum(row + part * BLOCK_ROWS, stop))
        tl.store(own_tile + 2, stop)


@triton.jit
def _local(experts, begin, first, num_choices, num_local, BLOCK: tl.constexpr):
    """Map choices to local expert numbers. Experts of other ranks map to ``num_local``."""
    choices = begin + tl.arange(0, BLOCK)
    local = tl.load(experts + choices, mask=choices < num_choices, other=-1) - first
    is_here = (local >= 0) & (local < num_local) & (choices < num_choices)
    return tl.where(is_here, local, num_local)


def sum_choices(answers: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Compute ``out[t] = sum_i weights[t, i] * answers[rows[t, i]]``, skipping negative ``rows [tokens, k]``.

    ``answers [rows, cols]`` and ``weights [tokens, k]`` fp32 are contiguous. Sums are fp32 and rounded once. Weights of
    a single token from another rank can begin anywhere in the row that was received.
    """
    assert rows.shape == weights.shape, f"rows have shape {rows.shape}, weights {weights.shape}"
    assert all(tensor.is_contiguous() for tensor in (answers, rows, weights)), "not all tensors are contiguous"
    (num_tokens, num_chosen), num_cols = rows.shape, answers.shape[1]
    out = torch.empty(num_tokens, num_cols, dtype=answers.dtype, device=answers.device)
    if num_tokens:
        _sum_choices_kernel[(num_tokens, triton.cdiv(num_cols, _BLOCK_COLS))](
            answers, rows, weights, out, num_chosen, num_cols, BLOCK_COLS=_BLOCK_COLS
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["weights"])
def _sum_choices_kernel(answers, rows, weights, out, num_chosen, num_cols, BLOCK_COLS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros((BLOCK_COLS,), tl.float32)
    for choice in range(0, num_chosen):
        row = tl.load(rows + token * num_chosen + choice).to(tl.int64)
        answer = tl.load(answers + row * num_cols + cols, mask=(cols < num_cols) & (row >= 0), other=0.0)
        total += answer.to(tl.float32) * tl.load(weights + token * num_chosen + choice)
    tl.store(out + token * num_cols + cols, total.to(out.dtype.element_ty), mask=cols < num_cols)
