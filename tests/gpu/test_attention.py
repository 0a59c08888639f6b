"""The cases of tests/unit/workers/kernels, compiled: `pytest -m gpu tests/gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.kernel_cases import DTYPES, PagedCase, check_paged, check_rows, compiled_cases
from tests.unit.workers.test_row_attention import rank_pairs
from workers.attention.triton.backend import TritonAttention
from workers.context_parallel.runs import Run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel


@settings(max_examples=200)
@given(st.data())
def test_pages(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(compiled_cases(4097, data.draw(DTYPES))), "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 700])
def test_a_whole_prompt(first: int, dtype: torch.dtype) -> None:
    """Tiles full of queries, of which most blocks of keys are seen whole."""
    case = PagedCase((Run(0, first, 4097, 1),), page_size=64, head_dim=128, groups=4, dtype=dtype)
    check_paged(TritonAttention(), case, "cuda")


@settings(max_examples=100)
@given(rank_pairs(), st.sampled_from([1, 3, 4]), DTYPES)
def test_rows(case: tuple[list[Run], list[Run]], groups: int, dtype: torch.dtype) -> None:
    check_rows(TritonAttention(), case, groups, dtype, "cuda")
