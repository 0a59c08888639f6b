"""Products in FP8 by their definition, in plain torch, and comparisons of the kernels with them on any device."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.kernel_cases import DTYPES
from tests.fakes.nearness import check_near
from workers.kernels.experts import RowTiles, tiles_of
from workers.kernels.fp8 import fp8_matmul, grouped_fp8_matmul, quantize_rows
from workers.quant.fp8_matrix import Fp8Matrix

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
NUM_ROWS = st.sampled_from([0, 1, 3, 17, 70, 130])
SIZES = st.sampled_from([(128, 128), (256, 128), (200, 64), (100, 96), (72, 32), (32, 32)])
"""Numbers of inputs, and widths of their groups, of which the last can be smaller."""
_GPU_TOLERANCE = 2e-3
"""Norm of a product's error on a GPU, relative to the product. Tensor cores of Ada and Hopper add terms in FP8 with 13
bits of mantissa (DeepSeek-V3, arXiv:2412.19437, section 3.5.2).
"""


def spread(scales: Tensor, width: int, size: int) -> Tensor:
    """Return one scale per element, given those of groups ``[..., groups]``."""
    return scales.repeat_interleave(width, dim=-1)[..., :size]


def quantized_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return FP8 values and fp32 scales of ``x [..., size]``."""
    peaks = [part.abs().amax(-1, keepdim=True) for part in torch.split(x.float(), width, dim=-1)]
    scales = torch.cat(peaks, dim=-1).clamp(min=1e-30) / LARGEST
    return (x.float() / spread(scales, width, x.shape[-1])).to(FP8), scales


def dequantized_rows(values: Tensor, scales: Tensor, width: int) -> Tensor:
    return values.double() * spread(scales, width, values.shape[-1]).double()


def rounded_rows(x: Tensor, width: int) -> Tensor:
    """Return ``x [..., size]`` as FP8 represents it, in fp64."""
    return dequantized_rows(*quantized_rows(x, width), width)


def plain(weight: Tensor | Fp8Matrix) -> Tensor:
    """Return a weight in fp32 if it is in FP8."""
    if isinstance(weight, Tensor):
        return weight
    return weight.values.float() * spread(weight.scales, weight.width, weight.shape[-1])


def drawn_weight(*shape: int, width: int) -> tuple[Tensor, Tensor]:
    """Return FP8 values, and scales of other sizes than those of activations."""
    values, scales = quantized_rows(torch.randn(shape), width)
    return values, scales * torch.rand(scales.shape)


def check_quantized_rows(data: st.DataObject, device: str) -> None:
    """Check rows in a wider tensor, with zeros and with numbers of any size."""
    size, width = data.draw(SIZES)
    x = torch.randn(data.draw(NUM_ROWS), 2 * size)[:, :size] * 10.0 ** data.draw(st.integers(-30, 30))
    x = x.masked_fill(torch.rand(len(x), 1) < 0.2, 0).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    expected, expected_scales = quantized_rows(x, width)
    values, scales = quantize_rows(x.to(device), width)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(values.cpu().view(torch.uint8), expected.view(torch.uint8))
    if device != "cpu":  # where interpreting it is an error
        infinite, _ = quantize_rows(torch.full((1, width), torch.inf).to(device), width)
        assert infinite.float().isnan().all()


def check_fp8_near(found: Tensor, exact: Tensor, device: str) -> None:
    """Check a product, given the exact one of the same numbers in FP8."""
    check_near(found, exact, tolerance=None if device == "cpu" else _GPU_TOLERANCE)


def check_fp8_product(data: st.DataObject, device: str) -> None:
    """Check any number of rows, with and without bias. NaN stays in its row, and other rows do not change."""
    (size, width), num_rows = data.draw(SIZES), data.draw(NUM_ROWS)
    num_cols, dtype = data.draw(st.sampled_from([16, 130, 200])), data.draw(DTYPES)
    x, bias = torch.randn(num_rows, size).to(dtype), data.draw(st.sampled_from([None, torch.randn(num_cols).to(dtype)]))
    values, scales = drawn_weight(num_cols, size, width=width)
    exact = rounded_rows(x, width) @ dequantized_rows(values, scales, width).T
    exact = exact if bias is None else exact + bias.double()
    there = values.to(device), scales.to(device), width, None if bias is None else bias.to(device)
    found = fp8_matmul(x.to(device), *there)
    check_fp8_near(found, exact, device)
    if num_rows:
        x[-1, 0] = torch.nan
        with_nan = fp8_matmul(x.to(device), *there)
        assert with_nan[-1].isnan().all()
        assert torch.equal(with_nan[:-1], found[:-1])


def check_grouped_fp8_product(data: st.DataObject, device: str) -> None:
    """Check experts with any number of rows, in order or taken from other rows, and then rows without an expert."""
    counts = data.draw(st.lists(st.sampled_from([0, 1, 3, 16, 70]), min_size=1, max_size=4))
    (size, width), cols, dtype = data.draw(SIZES), data.draw(st.sampled_from([16, 130])), data.draw(DTYPES)
    values, scales = drawn_weight(len(counts), cols, size, width=width)
    num_used, num_rows = sum(counts), sum(counts) + data.draw(st.integers(0, 3))
    x = torch.randn(max(num_rows, 1), size).to(dtype)
    sources = data.draw(st.sampled_from([None, torch.randint(0, len(x), (num_rows,), dtype=torch.int32)]))
    given, rows = (x[:num_rows],) * 2 if sources is None else (x, x[sources.long()])
    matrices, parts = dequantized_rows(values, scales, width), torch.split(rounded_rows(rows[:num_used], width), counts)
    exact = torch.cat([part @ matrix.T for part, matrix in zip(parts, matrices, strict=True)])
    used = tiles_of(counts, given.to(device))
    unused = torch.tensor([[-1, num_used, num_rows]], dtype=torch.int32).to(device)
    tiles = RowTiles(torch.cat((used.tiles, unused)), used.block_rows)
    there = values.to(device), scales.to(device), width, tiles, None if sources is None else sources.to(device)
    found = grouped_fp8_matmul(given.to(device), *there)
    check_fp8_near(found[:num_used], exact, device)
    assert not found[num_used:].any()


FP8_CHECKS = (check_quantized_rows, check_fp8_product, check_grouped_fp8_product)
