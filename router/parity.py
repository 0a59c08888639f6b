"""Comparison of an answer's log-probabilities with those of another computation of the same tokens."""

from collections.abc import Sequence
from math import inf, isnan
from typing import NamedTuple

ROUNDING = {"float32": 2.0**-16, "float16": 2.0**-10}
"""Unit of the allowed differences, by KV dtype: its precision, but for float32 128 times as much, because a confident
model turns the last digits of its sums into differences of up to 3e-4."""
COARSE_ROUNDING = 2.0**-7
"""Unit for bfloat16, and for dtypes with fewer digits."""
ALLOWANCE, LIMIT = 32, 512
"""Difference allowed for every token, and limit on the sum of further differences, in units."""


class Comparison(NamedTuple):
    """Absolute differences of the log-probabilities of one answer's tokens, in nats."""

    is_match: bool
    mean: float
    largest: float


def compare(given: Sequence[float], computed: Sequence[float], unit: float) -> Comparison:
    """Compare the log-probabilities of at least one token.

    What differences exceed ``ALLOWANCE`` by adds up, and what they fall short of it by is subtracted, down to 0. The
    sum must not exceed ``LIMIT``. This is a CUSUM chart (Page, "Continuous Inspection Schemes", 1954). Rounding causes
    small differences at many tokens and larger ones at single tokens; both pass. A wrong page causes a very large
    difference, or large ones at many tokens.

    Args:
        unit: one of ``ROUNDING``.
    """
    differences = [_difference(one, other) for one, other in zip(given, computed, strict=True)]
    total = most = 0.0
    for difference in differences:
        total = max(0.0, total + difference - ALLOWANCE * unit)
        most = max(most, total)
    return Comparison(most <= LIMIT * unit, sum(differences) / len(differences), max(differences))


def unit_of(dtypes: str) -> float:
    """Return the unit for KV of these dtypes, separated by commas: the coarsest one."""
    return max(ROUNDING.get(dtype, COARSE_ROUNDING) for dtype in dtypes.split(","))


def _difference(one: float, other: float) -> float:
    if one == other:  # which may be infinite
        return 0.0
    difference = abs(one - other)
    return inf if isnan(difference) else difference
