"""The accuracy measure for all kernels detects errors above its limit, and nothing else."""

import pytest
import torch

from tests.fakes.nearness import check_near


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_before_rounding_are_detected(dtype: torch.dtype) -> None:
    wanted, noise = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0)).double()
    for error in (wanted, noise):
        check_near((wanted + 0.9e-3 * error).to(dtype), wanted)
        with pytest.raises(AssertionError, match="off by"):
            check_near((wanted + 1.1e-3 * error).to(dtype), wanted)
