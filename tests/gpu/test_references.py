"""Every small kernel equals its reference in plain torch on a GPU: `pytest -m gpu tests/gpu`."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.kernel_references import CHECKS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@settings(max_examples=100)
@given(data=st.data())
def test_shapes(check: Callable[[st.DataObject, str], None], data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    check(data, "cuda")
