"""Cases of `baton bench kernels` for products in FP8, which include the quantization of activations."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from workers.bench.kernel_case import NUM_EXPERTS, KernelCase, random, rows_by_expert
from workers.bench.results import Limit
from workers.bench.shapes import BenchShape
from workers.kernels.experts import tiles_of
from workers.kernels.fp8 import fp8_matmul, grouped_fp8_matmul, quantize_rows

_WIDTH = 128


def fp8_cases(shape: BenchShape, device: torch.device, *, few_rows: int, many_rows: int) -> Iterator[KernelCase]:
    """Yield one kernel at a time, like ``kernel_cases``. The peer is torch's product with dequantized weights."""
    yield _product(shape, device, few_rows, Limit.BYTES)
    yield _product(shape, device, many_rows, Limit.FP8_FLOPS)
    yield _experts(shape, device, many_rows)


def _product(shape: BenchShape, device: torch.device, num_rows: int, limit: Limit) -> KernelCase:
    x, weight = random(device, num_rows, shape.hidden), random(device, shape.inner, shape.hidden)
    values, scales = quantize_rows(weight, _WIDTH)
    read = float(values.nbytes + scales.nbytes)
    return KernelCase(
        f"FP8 product of {num_rows}",
        limit,
        read if limit is Limit.BYTES else _flops(shape, num_rows),
        lambda: fp8_matmul(x, values, scales, _WIDTH),
        {"torch": lambda: functional.linear(x, weight)},
    )


def _experts(shape: BenchShape, device: torch.device, num_rows: int) -> KernelCase:
    x = random(device, num_rows, shape.hidden)
    weights: list[tuple[Tensor, Tensor]] = [
        quantize_rows(random(device, shape.inner, shape.hidden), _WIDTH) for _ in range(NUM_EXPERTS)
    ]
    values, scales = (torch.stack(parts) for parts in zip(*weights, strict=True))
    tiles = tiles_of(rows_by_expert(num_rows), x)
    return KernelCase(
        f"{NUM_EXPERTS} experts in FP8",
        Limit.FP8_FLOPS,
        _flops(shape, num_rows),
        lambda: grouped_fp8_matmul(x, values, scales, _WIDTH, tiles),
    )


def _flops(shape: BenchShape, num_rows: int) -> float:
    return 2.0 * num_rows * shape.hidden * shape.inner
