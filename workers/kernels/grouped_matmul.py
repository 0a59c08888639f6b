"""Grouped matrix products, one matrix per group of rows, for experts. The reference is a loop."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.device import on_device
from workers.kernels.launch import operand_type

TILE_FIELDS = 3
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


class RowTiles(NamedTuple):
    """Assignment of rows to matrices."""

    tiles: Tensor
    """``[n, 3]`` int32: (group, first row, row after the group's last); -1 for rows of no group, which become zero."""
    block_rows: int
    """Most rows of a tile."""


def block_rows_for(num_rows: int, num_groups: int, itemsize: int) -> int:
    """Return a tile size: at most the average rows per group, and no more than is fast."""
    return 16 if num_rows <= 16 * num_groups else 32 if itemsize > 2 else 64


def tiles_of(counts: Sequence[int], itemsize: int, device: torch.device) -> RowTiles:
    """Return tiles in which the first ``counts[0]`` rows meet the first matrix, and so on."""
    block_rows = block_rows_for(sum(counts), len(counts), itemsize)
    tiles, begin = [], 0
    for group, count in enumerate(counts):
        tiles += [(group, first, begin + count) for first in range(begin, begin + count, block_rows)]
        begin += count
    on_cpu = torch.tensor(tiles, dtype=torch.int32, device="cpu").view(-1, TILE_FIELDS)
    return RowTiles(on_device(on_cpu, device), block_rows)


def grouped_matmul(x: Tensor, weights: Tensor, tiles: RowTiles, sources: Tensor | None = None) -> Tensor:
    """Multiply rows of ``x [N, K]``, each with the one of ``weights [E, M, K]`` that its tile names: ``[N, M]``.

    With ``sources [rows]`` int32, row i is ``x[sources[i]]``. Every row is in one tile. All are contiguous.
    """
    assert x.is_contiguous(), f"strides {x.stride()}"
    assert weights.is_contiguous(), f"strides {weights.stride()}"
    num_rows = len(x) if sources is None else len(sources)
    out = x.new_empty((num_rows, weights.shape[1]))
    block_cols, block_inner = (32, 32) if x.itemsize > 2 else (128, 64)
    if len(tiles.tiles):
        _grouped_matmul_kernel[(triton.cdiv(out.shape[1], block_cols), len(tiles.tiles))](
            x,
            weights,
            out,
            tiles.tiles,
            sources,
            out.shape[1],
            x.shape[1],
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
