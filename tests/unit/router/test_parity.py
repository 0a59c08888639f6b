"""Comparison of log-probabilities: rounding passes, a wrong page does not."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.parity import ALLOWANCE, COARSE_ROUNDING, LIMIT, ROUNDING, compare, unit_of

UNIT = 2.0**-10
LOGPROBS = st.lists(st.floats(-30, 0, allow_nan=False), min_size=1, max_size=50)


def matches(*differences: float) -> bool:
    """Return whether an answer matches if its tokens differ by these units."""
    given, computed = [-40.0] * len(differences), [-40.0 + difference * UNIT for difference in differences]
    return compare(given, computed, UNIT).is_match


@given(LOGPROBS)
def test_equal_answers_match(logprobs: list[float]) -> None:
    assert compare(logprobs, logprobs, UNIT) == (True, 0.0, 0.0)


@given(st.lists(st.integers(-ALLOWANCE, ALLOWANCE), min_size=1, max_size=500))
def test_any_number_of_small_differences_match(units: list[int]) -> None:
    assert matches(*units)


@given(st.lists(st.integers(0, 40), max_size=30), st.sampled_from([-1, 1]), st.lists(st.integers(0, 40), max_size=30))
def test_one_large_difference_anywhere_is_a_mismatch(before: list[int], sign: int, after: list[int]) -> None:
    assert not matches(*before, sign * (ALLOWANCE + LIMIT + 1), *after)


def test_single_outliers_match_but_not_many_in_a_row() -> None:
    outlier = ALLOWANCE + LIMIT // 4
    assert matches(*[outlier, 0, 0, 0, 0] * 100)
    assert matches(*[outlier] * 4)
    assert not matches(*[outlier] * 5)


def test_differences_above_the_allowance_become_a_mismatch_if_they_last() -> None:
    assert matches(*[ALLOWANCE + 8] * (LIMIT // 8))
    assert not matches(*[ALLOWANCE + 8] * (LIMIT // 8 + 1))


def test_the_mean_and_the_largest_are_absolute() -> None:
    assert compare([-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0], UNIT)[1:] == (0.5, 1.0)


@pytest.mark.parametrize(("one", "other"), [(nan, -1.0), (-1.0, nan), (-inf, -1.0), (-1.0, -inf), (nan, nan)])
def test_numbers_that_are_not_finite_differ(one: float, other: float) -> None:
    assert compare([-1.0, one, -1.0], [-1.0, other, -1.0], UNIT) == (False, inf, inf)


def test_two_impossible_tokens_are_equal() -> None:
    assert compare([-inf], [-inf], UNIT).is_match


def test_the_unit_is_that_of_the_coarsest_dtype() -> None:
    assert unit_of("float32") == ROUNDING["float32"] < unit_of("float16") < unit_of("bfloat16") == COARSE_ROUNDING
    assert unit_of("bfloat16,float32") == COARSE_ROUNDING
    assert unit_of("float16,float8_e4m3fn") == COARSE_ROUNDING
