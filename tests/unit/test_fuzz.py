"""Bytes from outside make a decoder raise only what it promises. Run longer with ``python -m tests.fuzz``."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_are_taken(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].feed(seed)


@pytest.mark.parametrize("name", TARGETS)
@given(number=st.integers(0, 2**64))
def test_mutated_inputs_are_refused_in_order(name: str, number: int) -> None:
    target = TARGETS[name]
    target.feed(mutate(random.Random(number), target.seeds(), target.codec))


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused_in_order(name: str, data: bytes) -> None:
    TARGETS[name].feed(data)
