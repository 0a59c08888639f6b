"""Blocked bf16 attention against attention by definition in float64, with blocks so small that few tokens need many."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.workers.test_attention import Request, attend, expected
from workers.attention import blocked
from workers.attention.blocked import attend_blocked, is_worthwhile
from workers.context_parallel.merge import Partial
from workers.context_parallel.runs import Run


@pytest.fixture(autouse=True)
def fast_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(blocked, "multiplies_bf16", lambda: True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_ROWS": 64, "_KEYS": 24, "_DIAGONAL": 12, "_SAMPLE": 4, "MIN_PRODUCTS": 1}.items():
        monkeypatch.setattr(blocked, name, value)


def draw(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).bfloat16()


def by_definition(query: Tensor, key: Tensor, value: Tensor, ahead: int | None) -> Partial:
    scores = query.double() @ key.double()[:, None].transpose(2, 3) / query.shape[3] ** 0.5
    if ahead is not None:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu_(1 + ahead)
        scores = scores.masked_fill(hidden, -torch.inf)
    return Partial(scores.softmax(-1) @ value.double()[:, None], scores.logsumexp(-1))


def blocked_and_true(query: Tensor, key: Tensor, value: Tensor, ahead: int | None) -> tuple[Partial, Partial]:
    partial = attend_blocked(query, key, value, ahead)
    assert partial is not None
    assert (partial.out.dtype, partial.lse.dtype) == (torch.bfloat16, torch.float32)
    return partial, by_definition(query, key, value, ahead)


@pytest.mark.usefixtures("small_blocks")
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 90), st.integers(1, 150), st.data(), st.integers(0, 99))
def test_any_shape(heads: int, groups: int, num_queries: int, num_keys: int, data: st.DataObject, seed: int) -> None:
    ahead = data.draw(st.none() | st.integers(0, num_keys - 1))
    query = draw(seed, heads, groups, num_queries, 16)
    key, value = draw(seed + 1, heads, num_keys, 16), draw(seed + 2, heads, num_keys, 16)
    partial, true = blocked_and_true(query, key, value, ahead)
    np.testing.assert_allclose(partial.out.double(), true.out, atol=0.04)
    np.testing.assert_allclose(partial.lse.double(), true.lse, atol=0.03)


def test_at_its_real_size_it_is_as_close_as_bf16_allows() -> None:
    query, key, value = draw(0, 1, 2, 1300, 64), draw(1, 1, 1300, 64), draw(2, 1, 1300, 64)
    partial, true = blocked_and_true(query, key, value, 0)
    assert (partial.out.double() - true.out).abs().max() < 0.02
    assert (partial.out.double() - true.out).square().mean().sqrt() < 1e-3
    assert (partial.lse.double() - true.lse).abs().max() < 0.01


@pytest.mark.usefixtures("small_blocks")
def test_large_scores_lose_nothing_to_their_size() -> None:
    query, key, value = draw(0, 1, 2, 100, 64), draw(1, 1, 100, 64), draw(2, 1, 100, 64)
    partial, true = blocked_and_true(query, key, value, 0)
    # An offset shared by all keys changes no weight; scores rounded to bf16 at 200 would be off by up to a half.
    shifted_query, shifted_key = (torch.cat((x, torch.full_like(x, 5.0)), -1) for x in (query, key))
    shifted = attend_blocked(shifted_query, shifted_key, torch.cat((value, value), -1), 0)
    assert shifted is not None
    narrow = by_definition(query * 0.5**0.5, key, value, 0)
    assert (shifted.out[..., :64].double() - narrow.out).abs().max() < 0.03
    assert (shifted.lse.double() - narrow.lse).min() > 100
    assert (partial.out.double() - true.out).abs().max() < 0.04


@pytest.mark.usefixtures("small_blocks")
def test_a_key_far_above_all_that_was_sampled_is_left_to_the_other_kernel() -> None:
    query, key, value = torch.ones(1, 1, 90, 16).bfloat16(), torch.zeros(1, 90, 16).bfloat16(), draw(2, 1, 90, 16)
    key[0, 40] = 8.0
    assert attend_blocked(query, key, value, 0) is None
    request = Request(90, 0)
    request.k[40] = 8.0
    request.q[:] = np.abs(request.q)
    result = attend([request], [Run(0, 0, 90, 1)], dtype=torch.bfloat16)
    np.testing.assert_allclose(result.out.float().numpy(), expected([request], [Run(0, 0, 90, 1)]), atol=0.05)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("run", [Run(0, 0, 150, 1), Run(0, 61, 89, 1), Run(0, 2, 49, 3), Run(0, 31, 40, 2)], ids=str)
def test_runs_of_any_start_and_step_over_pages(run: Run) -> None:
    request = Request(150, 5)
    result = attend([request], [run], dtype=torch.bfloat16)
    np.testing.assert_allclose(result.out.float().numpy(), expected([request], [run]), atol=0.04)


def test_it_is_for_much_work_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    query = draw(0, 1, 2, 128, 64)
    num_keys = blocked.MIN_PRODUCTS // query.numel()
    assert is_worthwhile(query, num_keys)
    assert not is_worthwhile(query.float(), num_keys)
    assert not is_worthwhile(query[:, :, 1:], num_keys)
    assert not is_worthwhile(query, num_keys - 1)
    assert is_worthwhile(query[:, :, :1], blocked.MANY_KEYS)
    assert not is_worthwhile(query[:, :, :1], blocked.MANY_KEYS - 1)
    monkeypatch.setattr(blocked, "multiplies_bf16", lambda: False)
    assert not is_worthwhile(query, num_keys)
