"""The cases of tests/unit/workers/kernels, compiled: `pytest -m gpu tests/gpu`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.attention_params import params_for, shape_for
from tests.fakes.kernel_cases import (
    DTYPES,
    PagedCase,
    Wanted,
    check_paged,
    check_rows,
    compare,
    compiled_cases,
    latent_cases,
)
from tests.fakes.kv import kv_pool
from tests.fakes.nearness import check_near
from tests.fakes.selection_cases import (
    AttentionCase,
    ChoiceCase,
    attend,
    attention_cases,
    check_choice,
    choice_cases,
)
from tests.unit.workers.test_row_attention import rank_pairs
from workers.attention.runs import Run
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.decode import DecodeAttention

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel


@settings(max_examples=200)
@given(st.data())
def test_pages(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(compiled_cases(4097, data.draw(DTYPES))), "cuda")


@settings(max_examples=100)
@given(st.data())
def test_values_in_keys(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(latent_cases(4097, data.draw(DTYPES))), "cuda")


@settings(max_examples=50)
@given(st.data())
def test_pages_by_the_reference(data: st.DataObject) -> None:
    check_paged(TorchAttention(), data.draw(compiled_cases(1025, torch.float32)), "cuda")


@settings(max_examples=50)
@given(rank_pairs())
def test_rows_by_the_reference(case: tuple[list[Run], list[Run]]) -> None:
    check_rows(TorchAttention(), case, 4, torch.float32, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 700])
def test_a_whole_prompt(first: int, dtype: torch.dtype) -> None:
    """The tiles are full of queries, which see most blocks of keys completely."""
    case = PagedCase((Run(0, first, 4097, 1),), page_size=64, head_dim=128, groups=4, dtype=dtype)
    check_paged(TritonAttention(), case, "cuda")


@settings(max_examples=100)
@given(rank_pairs(), st.sampled_from([1, 3, 4]), DTYPES)
def test_rows(case: tuple[list[Run], list[Run]], groups: int, dtype: torch.dtype) -> None:
    check_rows(TritonAttention(), case, groups, dtype, "cuda")


@settings(max_examples=100)
@given(choice_cases, DTYPES)
def test_the_best_keys(case: ChoiceCase, dtype: torch.dtype) -> None:
    check_choice(TritonAttention(), case, dtype, "cuda")


@pytest.mark.parametrize("num_queries", [1, 128])
def test_the_best_of_many_keys(num_queries: int) -> None:
    """Scores exist for some tiles of keys at a time, and several programs choose from each."""
    case = ChoiceCase((num_queries, 64, 128), num_before=200_000, top_k=2048, page_size=64, seed=0)
    check_choice(TritonAttention(), case, torch.bfloat16, "cuda")


@settings(max_examples=50)
@given(attention_cases, DTYPES)
def test_selected_keys(case: AttentionCase, dtype: torch.dtype) -> None:
    compare(*attend(TritonAttention(), case, dtype, "cuda"), dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1)])
def test_parts_are_joined_once_all_have_arrived(heads: int, kv_heads: int) -> None:
    """Any program can finish last, launch after launch. All get the same result and leave the counters as they were."""
    torch.manual_seed(0)
    lens = [40_000, 1, 3_000]
    pool = kv_pool(
        sum(-(-length // 64) for length in lens), kv_heads, 1, 64, 128, torch.bfloat16, device=torch.device("cuda")
    )
    pool.group("full_attention").normal_()
    tables = torch.split(torch.randperm(pool.num_pages), [-(-length // 64) for length in lens])
    query = torch.randn(len(lens), heads, 128, dtype=torch.bfloat16, device="cuda")
    attention = DecodeAttention(shape_for(query, kv_heads, max(map(len, tables)), 64))
    attention.fill(lens, [table.numpy() for table in tables])
    first = attention.attend(query, *params_for(query).key_and_value(pool.layer_view(0)), params_for(query)).out
    for row, (length, table) in enumerate(zip(lens, tables, strict=True)):
        key, value = (x[table].transpose(1, 2).flatten(0, 1)[:length] for x in pool.layer_view(0))
        wanted = Wanted.of(query[row : row + 1].cpu(), key.cpu(), value.cpu(), np.ones((1, length), dtype=np.bool_))
        check_near(first[row : row + 1], wanted.out, wanted.rounded, num_rows=heads)
    for _ in range(2000):
        assert torch.equal(
            attention.attend(query, *params_for(query).key_and_value(pool.layer_view(0)), params_for(query)).out, first
        )
    assert not attention.arrived.any()
