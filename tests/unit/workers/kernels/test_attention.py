"""The attention kernel, through its backend, compared with reference attention in float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fakes.devices import use_meta_device
from tests.fakes.kernel_cases import (
    DTYPES,
    PagedCase,
    any_params,
    check_paged,
    check_rows,
    latent_cases,
    paged_cases,
    prompt_cases,
)
from tests.unit.workers.test_row_attention import new_rows, rank_pairs
from workers.attention.interface import AttentionParams
from workers.attention.runs import Run
from workers.attention.triton import backend as triton_backend
from workers.attention.triton import tiling
from workers.attention.triton.backend import TritonAttention

PARAMS = AttentionParams(1 / 8)


@settings(max_examples=8)
@given(st.data())
def test_pages(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(paged_cases(150, data.draw(DTYPES))), "cpu")


@pytest.mark.full
@settings(max_examples=150)
@given(st.data())
def test_pages_of_any_length(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(paged_cases(4097, data.draw(DTYPES))), "cpu")


@settings(max_examples=4)
@given(st.data())
def test_prompts(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(prompt_cases(600, data.draw(DTYPES))), "cpu")


@pytest.mark.full
@settings(max_examples=5)
@given(prompt_cases(4097, torch.bfloat16))
@example(PagedCase((Run(0, 0, 4097, 1),), page_size=64, groups=1, dtype=torch.bfloat16))
def test_prompts_of_any_length(case: PagedCase) -> None:
    check_paged(TritonAttention(), case, "cpu")


@settings(max_examples=8)
@given(paged_cases(150, torch.float32).flatmap(any_params))
def test_any_scale_window_and_width(case: PagedCase) -> None:
    check_paged(TritonAttention(), case, "cpu")


@settings(max_examples=8)
@given(st.data())
def test_values_in_keys(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(latent_cases(150, data.draw(DTYPES))), "cpu")


@settings(max_examples=4)
@given(new_rows(), st.integers(1, 20))
def test_rows_in_a_window(case: tuple[list[Run], list[Run]], window: int) -> None:
    check_rows(TritonAttention(), case, 2, torch.float32, "cpu", window)


@settings(max_examples=3)
@given(paged_cases(150, torch.float32), st.sampled_from([32, 64]))
def test_keys_that_are_split(case: PagedCase, least_keys: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "LEAST_KEYS", least_keys)
        check_paged(TritonAttention(), case, "cpu")


@settings(max_examples=8)
@given(rank_pairs(), st.sampled_from([1, 3, 4]), DTYPES)
def test_rows(case: tuple[list[Run], list[Run]], groups: int, dtype: torch.dtype) -> None:
    check_rows(TritonAttention(), case, groups, dtype, "cpu")


@pytest.mark.parametrize(
    "case",
    [
        PagedCase((Run(0, 0, 1, 1),)),
        PagedCase((Run(0, 129, 40, 1), Run(1, 64, 1, 1)), page_size=128, groups=5, head_dim=80),
        PagedCase((Run(0, 3, 30, 4), Run(0, 127, 1, 1)), page_size=64, groups=4, dtype=torch.bfloat16),
        PagedCase((Run(0, 0, 3, 1), Run(1, 0, 2, 1)), key_lens=(0, 17), head_dim=96),
        PagedCase((Run(0, 70, 350, 1), Run(0, 1120, 350, 1)), page_size=64, groups=1, dtype=torch.bfloat16),
        PagedCase((Run(0, 500, 40, 1), Run(1, 300, 1, 1)), params=AttentionParams(0.2, 150), value_dim=32),
        PagedCase((Run(0, 30, 2, 1),), groups=40, kv_heads=2),
    ],
    ids=[
        "first token",
        "mixed",
        "interleave",
        "a prefix of nothing",
        "zigzag of many behind a prefix",
        "window",
        "shares",
    ],
)
def test_examples(case: PagedCase) -> None:
    check_paged(TritonAttention(), case, "cpu")


def test_queries_of_no_run_are_empty() -> None:
    step = TritonAttention().prepare([Run(0, 1, 1, 1)], [torch.tensor([0])], 16)
    pages = torch.ones(1, 1, 16, 64)
    out, lse = step.attend(torch.ones(3, 1, 64), pages, pages, PARAMS)
    assert torch.equal(out[0, 0], torch.ones(64))
    assert not out[1:].any()
    assert lse[1:].eq(-torch.inf).all()


def test_no_queries_have_any_strides() -> None:
    pages = torch.randn(1, 1, 16, 64)
    query = torch.empty(64, 2, 0).permute(2, 1, 0)
    assert TritonAttention().prepare([], [], 16).attend(query, pages, pages, PARAMS).out.shape == (0, 2, 64)


def test_a_visible_nan_stays_nan() -> None:
    step = TritonAttention().prepare([Run(0, 0, 3, 1)], [torch.tensor([0])], 16)
    pages = torch.ones(1, 1, 16, 64)
    keys = pages.clone()
    keys[0, 0, 1] = torch.nan
    out, lse = step.attend(torch.ones(3, 1, 64), keys, pages, PARAMS)
    assert not out[0].isnan().any()
    assert out[1:].isnan().all()
    assert lse[1:].isnan().all()


def test_pages_of_another_size_are_our_own_bug() -> None:
    step = TritonAttention().prepare([Run(0, 0, 1, 1)], [torch.tensor([0])], 16)
    with pytest.raises(AssertionError, match="wrong page size 8"):
        step.attend(torch.ones(1, 1, 64), torch.ones(1, 1, 8, 64), torch.ones(1, 1, 8, 64), PARAMS)
    with pytest.raises(AssertionError, match="ends past its pages"):
        triton_backend.paged_items([Run(0, 16, 1, 1)], [1], 16, None)


def test_rows_without_waiting_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ``Device.put`` copies from the host in the background."""

    def wait(*_: object, **__: object) -> None:
        raise AssertionError("the host would wait for a copy")

    meta = use_meta_device(monkeypatch, has_kernels=True)
    monkeypatch.setattr(meta, "put", lambda on_host: torch.empty_like(on_host, device="meta"))
    monkeypatch.setattr(torch.Tensor, "to", wait)
    launches: list[torch.Tensor] = []
    monkeypatch.setattr(triton_backend, "attend", lambda *_, tables, **__: launches.append(tables))
    rows, run = torch.empty(5, 2, 64, device="meta"), [Run(0, 0, 5, 1)]
    TritonAttention().prepare_rows(run, run).attend(rows, rows, rows, PARAMS)
    assert [(tables.device, tables.dtype) for tables in launches] == [(meta.torch_device, torch.int64)]
