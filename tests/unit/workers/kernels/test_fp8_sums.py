"""Products in FP8 may be as inexact on a GPU as its tensor cores are, and no more."""

import pytest
import torch
from torch import Tensor

from tests.fakes.fp8_products import check_fp8_near, dequantized_rows, quantized_rows

WIDTH, AT_ONCE = 128, 32


def summed_like_hopper(x: Tensor, weight: Tensor, bits: int) -> Tensor:
    """Return ``x @ weight.T`` in fp64, whose terms and sums lose what lies below the largest one's first ``bits``.

    See DeepSeek-V3 (arXiv:2412.19437, section 3.5.2).
    """
    total = x.new_zeros(len(x), len(weight))
    for left, right in zip(torch.split(x, AT_ONCE, 1), torch.split(weight, AT_ONCE, 1), strict=True):
        terms = torch.cat((left[:, None] * right, total[..., None]), dim=-1)
        step = 2.0 ** (terms.abs().amax(-1, keepdim=True).log2().floor() - bits)
        total = ((terms / step).floor() * step).sum(-1)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_with_13_bits_are_near_on_a_gpu_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = quantized_rows(torch.randn(70, 2 * WIDTH), WIDTH), quantized_rows(torch.randn(130, 2 * WIDTH), WIDTH)
    exact = dequantized_rows(*x, WIDTH) @ dequantized_rows(*weight, WIDTH).T

    def product(bits: int) -> Tensor:
        total = torch.zeros(70, 130, dtype=torch.float64)
        for group in range(2):
            part = slice(group * WIDTH, (group + 1) * WIDTH)
            values = summed_like_hopper(x[0][:, part].double(), weight[0][:, part].double(), bits)
            total += values * x[1][:, group : group + 1] * weight[1][:, group]
        return total.to(dtype)

    check_fp8_near(product(13), exact, "cuda")
    if dtype == torch.float32:
        with pytest.raises(AssertionError, match="off by"):
            check_fp8_near(product(13), exact, "cpu")
    with pytest.raises(AssertionError, match="off by"):
        check_fp8_near(product(9), exact, "cuda")
