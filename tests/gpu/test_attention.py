"""The cases of tests/unit/workers/kernels, compiled: `pytest -m gpu tests/gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.kernel_cases import check_paged, check_rows, paged_cases
from tests.unit.workers.test_row_attention import rank_pairs
from workers.attention.triton.backend import TritonAttention
from workers.context_parallel.runs import Run

pytestmark = pytest.mark.gpu

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=200)
@given(st.data())
def test_pages(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(paged_cases(4097, data.draw(DTYPES))), "cuda")


@settings(max_examples=100)
@given(rank_pairs(), st.sampled_from([1, 3, 4]), DTYPES)
def test_rows(case: tuple[list[Run], list[Run]], groups: int, dtype: torch.dtype) -> None:
    check_rows(TritonAttention(), case, groups, dtype, "cuda")
