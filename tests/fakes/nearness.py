"""Accuracy that kernels must reach: one measure for all kernels on any device."""

import math

import torch
from torch import Tensor

_TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""Norm of the error relative to the reference, by output dtype."""
_LEAST_NORM = 1e-3


def check_near(
    found: Tensor,
    wanted: Tensor,
    rounded: Tensor | None = None,
    num_rows: float = math.inf,
    tolerance: float | None = None,
) -> None:
    """Check that a kernel's error is within tolerance, in addition to the rounding of its dtype.

    ``wanted`` is in fp64, from the same input. ``rounded`` is rounded where the reference rounds, or None if only the
    result is. ``num_rows`` is the number of attention rows. ``tolerance`` replaces that of the dtype.

    Rounding to bf16 changes a number by up to 2^-8 of it, and all numbers by 1.7e-3 of their norm, so neither elements
    nor the norm can be within 1e-3 of ``wanted``. The distance to ``rounded`` is too strict: if results are off by a
    hundredth of a rounding step, a hundredth of them is rounded the other way by a full step, which is a tenth of a
    step in the norm. But the rounding error is independent of the error before it, so their squares add up. Subtracting
    the square of the known rounding error leaves the kernel's own error.

    Attention rounds its weights to the dtype of the values, because tensor cores multiply no mixed dtypes. For n keys
    this is about 2^-9 / sqrt(n) of the sum of all terms' sizes. If values have zero mean, as here, their sum is also
    smaller by sqrt(n), and the result is off by 1.3e-3 for any number of keys. No kernel that rounds weights can do
    better, so ``rounded`` includes it. But a kernel rounds weights relative to the largest one so far. In a single row,
    few weights decide which of the two is luckier: up to 2e-3 of it, but only 1e-4 of several hundred rows.
    """
    assert found.shape == wanted.shape
    rounded = wanted.to(found.dtype) if rounded is None else rounded
    lost, off = ((each.cpu().double() - wanted).norm().item() for each in (rounded, found))
    relative = _TOLERANCES[found.dtype] if tolerance is None else tolerance
    own = relative * (1 + num_rows**-0.5) * max(wanted.norm().item(), _LEAST_NORM)
    assert off**2 <= lost**2 + own**2, f"off by {off}, where rounding makes {lost} and a kernel may make {own}"
