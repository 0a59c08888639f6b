"""How near a kernel must be to its reference: one measure for all kernels, on any device."""

import math

import torch
from torch import Tensor

_TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""What a kernel may be off, by the dtype of what it gives: a norm, relative to the reference's."""
_LEAST_NORM = 1e-3


def check_near(found: Tensor, wanted: Tensor, rounded: Tensor | None = None, num_rows: float = math.inf) -> None:
    """A kernel is off by no more than the tolerance, beside what its dtype does to the reference itself.

    wanted: in fp64, of what the kernel was given. rounded: the same, rounded where the reference rounds; None where
    only the result is. num_rows: how many rows of attention there are.

    Rounding to bf16 moves a number by up to 2^-8 of it, and all of them by 1.7e-3 of their norm: neither an element nor
    the norm can be within 1e-3 of ``wanted``. The distance to ``rounded`` says too much: of results that are off by a
    hundredth of a step a hundredth is rounded the other way, by a whole step, which is a tenth of one in the norm. But
    rounding does not depend on what a result was off before it, so the squares of both add up, and what is left
    without the square of the one that is known is the kernel's own.

    Attention rounds its weights to the dtype of the values, since tensor cores multiply no others. Of n keys that is
    some 2^-9 / sqrt(n) of the sum of all terms' sizes; where values have no mean, as here, their sum is smaller by
    sqrt(n) too, and the result 1.3e-3 off, however many keys there are. No kernel that rounds weights can do better, so
    this is in ``rounded`` as well. But a kernel rounds them relative to the largest that it has seen so far, and of one
    row few weights decide which of both is luckier: by up to 2e-3 of it, where it is 1e-4 of some hundred rows.
    """
    assert found.shape == wanted.shape
    rounded = wanted.to(found.dtype) if rounded is None else rounded
    lost, off = ((each.cpu().double() - wanted).norm().item() for each in (rounded, found))
    own = _TOLERANCES[found.dtype] * (1 + num_rows**-0.5) * max(wanted.norm().item(), _LEAST_NORM)
    assert off**2 <= lost**2 + own**2, f"off by {off}, where rounding makes {lost} and a kernel may make {own}"
