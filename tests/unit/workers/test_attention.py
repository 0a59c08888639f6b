"""The torch backend compared with reference attention. Every slot that it must not read is NaN."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.attention_params import params_for
from tests.fakes.devices import use_meta_device
from tests.fakes.kernel_cases import PagedCase, any_params, check_paged, check_rows, paged_cases, prompt_cases
from tests.unit.workers.test_row_attention import check, masked_attention, new_rows, rank_pairs
from workers.attention import torch_backend
from workers.attention.interface import AttentionParams
from workers.attention.merge import Partial, merge_in_turn, with_sinks
from workers.attention.runs import Run
from workers.attention.torch_backend import TorchAttention

TORCH = TorchAttention()
CASES = st.one_of(paged_cases(150, torch.float32), prompt_cases(150, torch.float32))


@settings(deadline=None, max_examples=60)
@given(CASES)
def test_pages(case: PagedCase) -> None:
    check_paged(TORCH, case, "cpu")


@settings(deadline=None, max_examples=50)
@given(CASES.flatmap(any_params), st.sampled_from([1, 100, 1 << 20]), st.sampled_from([16, 50, 1 << 20]))
def test_any_scale_window_and_width_in_blocks_of_any_size(case: PagedCase, most_scores: int, most_keys: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "MOST_SCORES", most_scores)
        patch.setattr(torch_backend, "MOST_KEYS", most_keys)
        patch.setattr(torch_backend, "MOST_SINGLE_KEYS", most_keys)
        check_paged(TORCH, case, "cpu")


@settings(deadline=None, max_examples=60)
@given(rank_pairs(), st.sampled_from([1, 3]))
def test_rows(case: tuple[list[Run], list[Run]], groups: int) -> None:
    check_rows(TORCH, case, groups, torch.float32, "cpu")


@settings(deadline=None, max_examples=60)
@given(new_rows(), st.integers(1, 20))
def test_rows_in_a_window(case: tuple[list[Run], list[Run]], window: int) -> None:
    check_rows(TORCH, case, 2, torch.float32, "cpu", window)


def test_several_runs_of_one_request_share_its_keys() -> None:
    check_paged(TORCH, PagedCase((Run(0, 20, 5, 1), Run(0, 29, 1, 1), Run(0, 2, 4, 3), Run(0, 0, 1, 1))), "cpu")


def tensors(num_queries: int, num_keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(num_queries, 6, 16), torch.randn(num_keys, 2, 16), torch.randn(num_keys, 2, 16)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def seen(num_queries: int, num_keys: int) -> np.ndarray:
    """Return a mask in which the queries are the last tokens."""
    return np.tri(num_queries, num_keys, num_keys - num_queries, dtype=np.bool_)


@pytest.mark.parametrize("num_queries", [1, 12, 40])
def test_bf16_stays_close_and_keeps_its_dtype(num_queries: int) -> None:
    query, key, value = tensors(num_queries, 40, torch.bfloat16)
    runs = [Run(0, 40 - num_queries, num_queries, 1)], [Run(0, 0, 40, 1)]
    result = TORCH.prepare_rows(*runs).attend(query, key, value, params_for(query))
    assert result.out.dtype == torch.bfloat16
    check(result, masked_attention(query, key, value, seen(num_queries, 40)), atol=0.03)


def test_only_the_result_is_rounded() -> None:
    query, key, value = tensors(1, 40, torch.bfloat16)
    attention = TORCH.prepare_rows([Run(0, 39, 1, 1)], [Run(0, 0, 40, 1)])
    out, lse = attention.attend(query, key, value, params_for(query))
    wanted = attention.attend(query.float(), key.float(), value.float(), params_for(query))
    assert torch.equal(out, wanted.out.bfloat16())
    assert torch.equal(lse, wanted.lse)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 20), max_size=3), st.sampled_from([None, 1, 6]))
def test_a_sink_joins_the_softmax_once_however_keys_are_sharded(ends: list[int], window: int | None) -> None:
    query, key, value = tensors(20, 20)
    sinks = torch.linspace(-2, 3, 6)
    params = replace(params_for(query, window), sinks=sinks)
    edges = list(pairwise([0, *sorted(ends), 20]))
    shards = [TORCH.prepare_rows([Run(0, 0, 20, 1)], [Run(0, begin, end - begin, 1)]) for begin, end in edges]
    kvs = [(key[begin:end], value[begin:end]) for begin, end in edges]
    found = [shard.attend(query, *kv, params) for shard, kv in zip(shards, kvs, strict=True)]
    mask = seen(20, 20) if window is None else seen(20, 20) & ~np.tri(20, 20, -window, dtype=np.bool_)
    # A sink is a score whose value is zero.
    out, lse = masked_attention(query, key, value, mask)
    whole = torch.logaddexp(lse, sinks.double())
    joined = merge_in_turn(found)
    assert joined is not None
    check(with_sinks(joined, sinks), Partial(out * (lse - whole).exp()[..., None], whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_alone_takes_all_and_gives_nothing(dtype: torch.dtype) -> None:
    query, key, value = tensors(2, 3, dtype)
    params = AttentionParams(1.0, sinks=torch.full((6,), 0.5))
    empty = TORCH.prepare_rows([Run(0, 0, 2, 1)], [Run(1, 0, 3, 1)]).attend(query, key, value, params)
    out, lse = with_sinks(empty, params.sinks)
    assert out.dtype == dtype
    assert not out.any()
    assert lse.eq(0.5).all()


def test_transients_do_not_grow_with_queries_times_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "MOST_SCORES", 1 << 12)
    sizes: list[int] = []
    attend_queries = torch_backend._attend_queries

    def note(query: Tensor, key: Tensor, *rest: Any) -> Partial:
        sizes.append(query.shape[0] * query.shape[1] * key.shape[1])
        return attend_queries(query, key, *rest)

    monkeypatch.setattr(torch_backend, "_attend_queries", note)
    query, key, value = tensors(100, 500)
    attention = TORCH.prepare_rows([Run(0, 400, 100, 1)], [Run(0, 0, 500, 1)])
    attention.attend(query, key, value, params_for(query, 450))
    assert max(sizes) <= 1 << 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("key_lens", [None, (3, 40, 0, 31)])
def test_a_gpu_is_never_synchronized(
    key_lens: tuple[int, ...] | None, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is created on the device: meta tensors have no content and cannot be mixed with other tensors."""
    use_meta_device(monkeypatch)
    runs = (Run(0, 3, 5, 1), Run(1, 40, 6, 1), Run(2, 7, 1, 1), Run(3, 30, 1, 1))
    tables = [torch.empty(9, dtype=torch.int64, device="meta")] * 4
    query = torch.empty(13, 4, 64, dtype=dtype, device="meta")
    pages = torch.empty(40, 2, 16, 64, dtype=dtype, device="meta")
    params = params_for(query, window)
    for out, lse in (
        TORCH.prepare(runs, tables, 16, key_lens).attend(query, pages, pages, params),
        TORCH.prepare_rows(runs, runs).attend(query, query[:, :2], query[:, 2:], params),
    ):
        assert (out.shape, out.device.type, out.dtype) == (query.shape, "meta", dtype)
        assert (lse.shape, lse.device.type, lse.dtype) == (query.shape[:2], "meta", torch.float32)


def test_no_runs_yield_no_rows() -> None:
    query, pages = torch.empty(0, 6, 16), torch.empty(1, 2, 4, 16)
    assert TORCH.prepare([], [], 4).attend(query, pages, pages, params_for(query)).out.shape == (0, 6, 16)


def test_a_step_can_be_used_for_every_layer_and_changes_no_page() -> None:
    pages = torch.randn(2, 2, 2, 4, 8)
    before = pages.clone()
    step = TORCH.prepare([Run(0, 4, 1, 1), Run(1, 1, 1, 1)], [torch.tensor([0, 1])] * 2, 4)
    query = torch.randn(2, 6, 8)
    first, other, again = (step.attend(query, pages[n], pages[1 - n], params_for(query)).out for n in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert torch.equal(pages, before)
