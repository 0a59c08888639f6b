"""Every small kernel equals its reference in plain torch."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.kernel_references import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@settings(max_examples=4)
@given(data=st.data())
def test_some_shapes(check: Callable[[st.DataObject, str], None], data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    check(data, "cpu")


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@settings(max_examples=100)
@given(data=st.data())
def test_shapes(check: Callable[[st.DataObject, str], None], data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    check(data, "cpu")
