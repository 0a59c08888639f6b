"""Rows in groups, each group times a matrix of its own: the products of experts. The reference is a loop."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.device import on_device
from workers.kernels.launch import operand_type

_TILE_FIELDS = tl.constexpr(3)


def grouped_matmul(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """``x [N, K]``, the first ``counts[0]`` rows times ``weights[0]``, and so on: ``[N, M]`` for weights ``[E, M, K]``.

    Both are contiguous.
    """
    assert sum(counts) == len(x), f"{sum(counts)} rows in groups of {len(x)}"
    assert x.is_contiguous(), f"strides {x.stride()}"
    assert weights.is_contiguous(), f"strides {weights.stride()}"
    out = x.new_empty((len(x), weights.shape[1]))
    is_wide = x.itemsize > 2
    block_rows = 16 if len(x) <= 16 * len(counts) else 32 if is_wide else 64
    tiles = on_device(torch.tensor(_tiles(counts, block_rows), dtype=torch.int32, device="cpu").view(-1, 3), x.device)
    block_cols, block_inner = (32, 32) if is_wide else (128, 64)
    if len(tiles):
        _grouped_matmul_kernel[(triton.cdiv(out.shape[1], block_cols), len(tiles))](
            x,
            weights,
            out,
            tiles,
            out.shape[1],
            x.shape[1],
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=block_cols,
            BLOCK_INNER=block_inner,
            OPERAND=operand_type(x.dtype),
            num_warps=4,
            num_stages=3,
        )
    return out


def _tiles(counts: Sequence[int], block_rows: int) -> list[tuple[int, int, int]]:
    """(group, first row, row after the group's last) of each tile."""
    tiles, begin = [], 0
    for group, count in enumerate(counts):
        tiles += [(group, first, begin + count) for first in range(begin, begin + count, block_rows)]
        begin += count
    return tiles


@triton.jit
def _grouped_matmul_kernel(
    x, weights, out, tiles, num_cols, num_inner,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_INNER: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * _TILE_FIELDS
    group, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    rows = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inner = tl.arange(0, BLOCK_INNER)
    is_row, is_col = rows < stop, cols < num_cols
    row_places = x + rows[:, None] * num_inner
    col_places = weights + (group * num_cols + cols[:, None]) * num_inner
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(0, num_inner, BLOCK_INNER):
        is_inner = (start + inner < num_inner)[None, :]
        part = tl.load(row_places + start + inner[None, :], mask=is_row[:, None] & is_inner, other=0.0)
        matrix = tl.load(col_places + start + inner[None, :], mask=is_col[:, None] & is_inner, other=0.0)
        total = tl.dot(part.to(OPERAND), tl.trans(matrix.to(OPERAND)), total, input_precision="ieee")
    targets = out + rows[:, None] * num_cols + cols[None, :]
    tl.store(targets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])
