"""Selections with kernels, compared with plain torch."""

import numpy as np
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
from workers.attention.interface import AttentionParams
from workers.attention.selection import NO_KEY, IndexQueries, QueryRun
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton import selection, tiling
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.selection import batches_of


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


def test_runs_of_few_queries_share_a_batch() -> None:
    assert batches_of([1, 0, 4, 5, 1, 1], 6) == [slice(0, 5), slice(5, 10), slice(10, 12)]
    assert batches_of([20, 3, 4, 2], 8) == [*map(slice, (0, 8, 16), (8, 16, 20)), slice(20, 27), slice(27, 29)]
    assert batches_of([], 8) == []


def test_requests_in_decode_share_their_launches() -> None:
    """Each has pages of its own, and one request sees no key."""
    torch.manual_seed(0)
    lens, keys, pages = [70, 0, 20, 33], torch.randn(10, 1, 16, 40), torch.randperm(10)
    tables = torch.split(pages, [-(-length // 16) for length in lens])
    runs = [QueryRun(slice(at, at + 1), table, np.array([lens[at]])) for at, table in enumerate(tables)]
    index, query = IndexQueries(torch.randn(4, 2, 40), torch.randn(4, 2)), torch.randn(4, 3, 40)
    ours, theirs = (backend.prepare_selection(runs) for backend in (TritonAttention(), TorchAttention()))
    (batch,) = ours.batches
    found = ours.best_keys(index, keys, batch, 25)
    for row, one in enumerate(theirs.batches):
        expected = theirs.best_keys(index, keys, one, 25)
        assert found.keys[row, : lens[row]].tolist() == expected.keys[0].tolist()
    selected = found.keys.masked_fill(found.scores == -torch.inf, NO_KEY).int()
    params = AttentionParams(0.2, value_dim=32)
    for got, wanted in zip(*(step.attend(query, keys, selected, params) for step in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, wanted)


@settings(max_examples=6)
@given(attention_cases, DTYPES)
def test_attention_to_selected_keys(case: AttentionCase, dtype: torch.dtype) -> None:
    compare(*attend(TritonAttention(), case, dtype), dtype)


@pytest.mark.parametrize("most", [1 << 20, 500])
def test_selected_keys_that_are_split(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts of a query have no keys, and not all queries are in one launch."""
    monkeypatch.setattr(selection, "_MOST_PLACES", most)
    monkeypatch.setattr(tiling, "LEAST_KEYS", 64)
    case = AttentionCase((4, 40, 32), 3, 250, 16, 0)
    compare(*attend(TritonAttention(), case, torch.bfloat16), torch.bfloat16)
