"""Products of activations with FP8 weights, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3).

Weights [outputs, inputs] have one scale per output and group of ``width`` inputs. Activations are quantized in each
call, with one scale per row and group. Products of a group are summed in FP8's tensor cores, groups in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.experts import TILE_FIELDS, RowTiles, block_rows_for
from workers.kernels.launch import block_of, operand_type

_DTYPE = torch.float8_e4m3fn
_LARGEST: float = torch.finfo(_DTYPE).max
_LEAST_PEAK = 1e-30
"""Number that a group's largest element at least counts as, so that no scale is zero or subnormal."""
_LEAST_INNER = 32
"""Least number of inputs in a product of tensor cores."""
_GROUPS = 8
"""Number of groups that a program quantizes."""
_NEIGHBOURS = 8
"""Number of row tiles that are multiplied by the same columns at a time, so that weights stay in the L2 cache."""


def quantize_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Quantize each row of ``x [R, K]`` in groups of ``width`` elements, of which the last can be smaller.

    Returns FP8 values ``[R, K]`` and fp32 scales ``[R, groups]``. A group's largest element becomes FP8's largest
    number. A group with NaN or infinity has NaN.
    """
    assert x.stride(1) == 1, f"strides {x.stride()}"
    num_rows, size = x.shape
    num_groups = triton.cdiv(size, width)
    values = torch.empty(num_rows, size, dtype=_DTYPE, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    if num_rows:
        _quantize_kernel[(num_rows, triton.cdiv(num_groups, _GROUPS))](
            *(x, values, scales, x.stride(0), size, num_groups),
            WIDTH=width,
            GROUPS=_GROUPS,
            BLOCK=block_of(width),
            num_warps=4,
        )
    return values, scales


_LARGEST_NUMBER, _LEAST = tl.constexpr(_LARGEST), tl.constexpr(_LEAST_PEAK)


@triton.jit
def _quantize_kernel(
    x, values, scales, x_stride, size, num_groups,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    dims = tl.arange(0, BLOCK)
    at = groups[:, None] * WIDTH + dims[None, :]
    is_held = (at < size) & (dims < WIDTH)[None, :]
    given = tl.load(x + row * x_stride + at, mask=is_held, other=0.0).to(tl.float32)
    # Rounded like in plain torch, so that the same numbers follow.
    scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(given), 1), _LEAST), _LARGEST_NUMBER)
    scaled = tl.math.div_rn(given, tl.broadcast_to(scale[:, None], given.shape))
    tl.store(values + row * size + at, scaled.to(values.dtype.element_ty), mask=is_held)
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)


def fp8_matmul(x: Tensor, weight: Tensor, scales: Tensor, width: int, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x [R, K]`` by ``weight [M, K]`` in FP8 with fp32 ``scales [M, groups]``. Return ``[R, M]``.

    The sum, with a bias ``[M]``, is rounded once. Matrices are contiguous.
    """
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if len(x):
        block_rows = block_rows_for(len(x), 1, _DTYPE.itemsize)
        num_tiles = triton.cdiv(len(x), block_rows)
        _launch(quantize_rows(x, width), weight, scales, out, width, block_rows, num_tiles, bias=bias)
    return out


def grouped_fp8_matmul(
    x: Tensor, weights: Tensor, scales: Tensor, width: int, tiles: RowTiles, sources: Tensor | None = None
) -> Tensor:
    """Multiply like ``grouped_matmul``, by FP8 ``weights [E, M, K]`` with fp32 ``scales [E, M, groups]``."""
    num_rows = len(x) if sources is None else len(sources)
    out = torch.empty(num_rows, weights.shape[1], dtype=x.dtype, device=x.device)
    if num_tiles := len(tiles.tiles):
        rows = quantize_rows(x, width)
        _launch(rows, weights, scales, out, width, tiles.block_rows, num_tiles, tiles=tiles.tiles, sources=sources)
    return out


def _launch(
    rows: tuple[Tensor, Tensor],
    weights: Tensor,
    scales: Tensor,
    out: Tensor,
    width: int,
    block_rows: int,
    num_tiles: int,
    *,
    tiles: Tensor | None = None,
    sources: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    x, x_scales = rows
    assert weights.is_contiguous(), f"strides {weights.stride()}"
    assert scales.is_contiguous(), f"strides {scales.stride()}"
    assert x_scales.shape[1] == scales.shape[-1], f"{x_scales.shape[1]} groups, but weights have {scales.shape[-1]}"
    num_cols, num_inner = weights.shape[-2:]
    # Few rows leave the GPU's memory as the limit, which many small programs use best.
    block_cols = 32 if block_rows == 16 else 128
    _matmul_kernel[(triton.cdiv(num_cols, block_cols), num_tiles)](
        *(x, x_scales, weights, scales, out, tiles, sources, bias, len(out), num_cols, num_inner, scales.shape[-1]),
        WIDTH=width,
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols,
        BLOCK_INNER=block_of(width, _LEAST_INNER),
        NEIGHBOURS=_NEIGHBOURS,
        OPERAND=operand_type(_DTYPE),
        num_warps=4,
        num_stages=4,
    )


_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x, x_scales, weights, scales, out, tiles, sources, bias, num_rows, num_cols, num_inner, num_groups,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    NEIGHBOURS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute a tile of rows and columns. Without ``tiles``, all rows belong to one matrix."""
    row_tile, col_tile = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), NEIGHBOURS
    )
    group, first, stop = tl.cast(0, tl.int64), row_tile * BLOCK_ROWS, num_rows
    if tiles is not None:
        tile = tiles + row_tile * _TILE_FIELDS
        group, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first >= stop:
        return
    rows = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    cols = col_tile * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inner = tl.arange(0, BLOCK_INNER)
    is_row, is_col = rows < stop, cols < num_cols
    of_rows, of_cols = rows, group * num_cols + cols
    if sources is not None:
        of_rows = tl.load(sources + rows, mask=is_row, other=0).to(tl.int64)
    row_places = x + of_rows[:, None] * num_inner + inner[None, :]
    col_places = weights + of_cols[:, None] * num_inner + inner[None, :]
    row_scales, col_scales = x_scales + of_rows * num_groups, scales + of_cols * num_groups
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for index in range(0, tl.where(group < 0, 0, num_groups)):
        start = index * WIDTH
        is_inner = ((inner < WIDTH) & (start + inner < num_inner))[None, :]
        part = tl.load(row_places + start, mask=is_row[:, None] & is_inner, other=0.0)
        matrix = tl.load(col_places + start, mask=is_col[:, None] & is_inner, other=0.0)
        of_row = tl.load(row_scales + index, mask=is_row, other=0.0)
        of_col = tl.load(col_scales + index, mask=is_col, other=0.0)
        product = tl.dot(part.to(OPERAND), tl.trans(matrix.to(OPERAND)), input_precision="ieee")
        total += product * of_row[:, None] * of_col[None, :]
    if bias is not None:
        total += tl.load(bias + cols, mask=is_col, other=0.0).to(tl.float32)[None, :]
    targets = out + rows[:, None] * num_cols + cols[None, :]
    tl.store(targets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])
