"""Selections with kernels, compared with plain torch."""

import pytest
import torch
from hypothesis import given, settings

from tests.fakes.kernel_cases import DTYPES, compare
from tests.fakes.selection_cases import (
    AttentionCase,
    ChoiceCase,
    attend,
    attention_cases,
    check_choice,
    choice_cases,
)
from workers.attention.triton import selection, tiling
from workers.attention.triton.backend import TritonAttention


@settings(max_examples=6)
@given(choice_cases, DTYPES)
def test_the_best_keys_are_those_of_the_reference(case: ChoiceCase, dtype: torch.dtype) -> None:
    check_choice(TritonAttention(), case, dtype)


@pytest.mark.parametrize("most", [40, 4000])
@pytest.mark.parametrize("num_queries", [2, 5])
def test_the_best_of_several_tiles(most: int, num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles may have fewer keys than are chosen, or more."""
    monkeypatch.setattr(selection, "MOST_SCORED", most)
    case = ChoiceCase((num_queries, 3, 20), num_before=200, top_k=30, page_size=16, seed=1)
    check_choice(TritonAttention(), case, torch.float32)


@settings(max_examples=6)
@given(attention_cases, DTYPES)
def test_attention_to_selected_keys(case: AttentionCase, dtype: torch.dtype) -> None:
    compare(*attend(TritonAttention(), case, dtype), dtype)


@pytest.mark.parametrize("most", [1 << 22, 500])
def test_selected_keys_that_are_split(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts of a query have no keys, and not all queries are in one launch."""
    monkeypatch.setattr(selection, "MOST_SELECTED", most)
    monkeypatch.setattr(tiling, "LEAST_KEYS", 64)
    case = AttentionCase((4, 40, 32), 3, 250, 16, 0)
    compare(*attend(TritonAttention(), case, torch.bfloat16), torch.bfloat16)
