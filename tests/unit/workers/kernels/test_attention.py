"""The attention kernel, through its backend, against attention by definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.kernel_cases import PagedCase, check_paged, check_rows, compare, paged_cases
from tests.unit.workers.test_row_attention import rank_pairs
from workers.attention.triton import backend as triton_backend
from workers.attention.triton import tiling
from workers.attention.triton.backend import TritonAttention
from workers.context_parallel.merge import Partial, merge
from workers.context_parallel.runs import Run
from workers.kernels.merge import merge_partials, merge_parts

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=8)
@given(st.data())
def test_pages(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(paged_cases(150, data.draw(DTYPES))), "cpu")


@pytest.mark.full
@settings(max_examples=150)
@given(st.data())
def test_pages_of_any_length(data: st.DataObject) -> None:
    check_paged(TritonAttention(), data.draw(paged_cases(4097, data.draw(DTYPES))), "cpu")


@settings(max_examples=5)
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
    ],
    ids=["first token", "mixed", "interleave", "a prefix of nothing"],
)
def test_examples(case: PagedCase) -> None:
    check_paged(TritonAttention(), case, "cpu")


def test_queries_of_no_run_are_empty() -> None:
    step = TritonAttention().prepare([Run(0, 1, 1, 1)], [torch.tensor([0])], 16)
    pages = torch.ones(1, 1, 16, 64)
    out, lse = step.attend(torch.ones(3, 1, 64), pages, pages)
    assert torch.equal(out[0, 0], torch.ones(64))
    assert not out[1:].any()
    assert lse[1:].eq(-torch.inf).all()


def test_no_queries_have_any_strides() -> None:
    pages = torch.randn(1, 1, 16, 64)
    query = torch.empty(64, 2, 0).permute(2, 1, 0)
    assert TritonAttention().prepare([], [], 16).attend(query, pages, pages).out.shape == (0, 2, 64)


def test_no_queries() -> None:
    step = TritonAttention().prepare([], [], 16)
    pages = torch.ones(1, 2, 16, 64)
    assert step.attend(torch.empty(0, 4, 64), pages, pages).out.shape == (0, 4, 64)


def test_a_nan_that_is_seen_stays_one() -> None:
    step = TritonAttention().prepare([Run(0, 0, 3, 1)], [torch.tensor([0])], 16)
    pages = torch.ones(1, 1, 16, 64)
    keys = pages.clone()
    keys[0, 0, 1] = torch.nan
    out, lse = step.attend(torch.ones(3, 1, 64), keys, pages)
    assert not out[0].isnan().any()
    assert out[1:].isnan().all()
    assert lse[1:].isnan().all()


def test_pages_of_another_size_are_our_own_bug() -> None:
    step = TritonAttention().prepare([Run(0, 0, 1, 1)], [torch.tensor([0])], 16)
    with pytest.raises(AssertionError, match="pages of 8 tokens"):
        step.attend(torch.ones(1, 1, 64), torch.ones(1, 1, 8, 64), torch.ones(1, 1, 8, 64))
    with pytest.raises(AssertionError, match="ends past its pages"):
        triton_backend.paged_items([Run(0, 16, 1, 1)], [1], 16, None)


@settings(max_examples=10)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_merging_parts(most: int, step: int, seed: int) -> None:
    """More than are held at once; what lies between and behind a row's own is not to be looked at."""
    torch.manual_seed(seed)
    counts = torch.randint(1, most + 1, (3,)).tolist()
    firsts = [1, 1 + step * counts[0], 1 + step * (counts[0] + counts[1])]
    found = torch.full((firsts[2] + step * counts[2], 2, 80), torch.nan)
    found_lse = torch.full(found.shape[:2], torch.nan)
    own = [[first + step * number for number in range(count)] for first, count in zip(firsts, counts, strict=True)]
    for parts in own:
        found[parts], found_lse[parts] = torch.randn(len(parts), 2, 80), 30 * torch.randn(len(parts), 2)
    found_lse[torch.rand(found_lse.shape) < 0.3] = -torch.inf
    found[found_lse == -torch.inf] = 0
    result = Partial(torch.full((4, 2, 80), 7.0), torch.full((4, 2), 7.0))
    rows = [2, -1, 0]
    joins = [[row, first, step, count] for row, first, count in zip(rows, firsts, counts, strict=True)]
    merge_parts(found, found_lse, torch.tensor(joins, dtype=torch.int32), *result)
    assert result.out[[1, 3]].eq(7).all()
    for row, parts in zip(rows, own, strict=True):
        if row >= 0:
            expected = merge_in_double([Partial(found[part : part + 1], found_lse[part : part + 1]) for part in parts])
            compare(Partial(*(x[row : row + 1] for x in result)), expected, torch.float32)


def merge_in_double(parts: list[Partial]) -> Partial:
    return merge([Partial(part.out.double(), part.lse.double()) for part in parts])


@settings(max_examples=10)
@given(st.integers(1, 6), st.sampled_from([(0, 1), (1, 3), (9, 2)]), st.sampled_from([64, 80]), st.data())
def test_merging_partials(num: int, shape: tuple[int, int], head_dim: int, data: st.DataObject) -> None:
    dtype = data.draw(DTYPES)
    torch.manual_seed(0)
    outs = [torch.randn(*shape, head_dim).to(dtype) for _ in range(num)]
    lses = [torch.randn(shape) for _ in range(num)]
    for out, lse in zip(outs, lses, strict=True):
        is_empty = torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
        out[is_empty], lse[is_empty] = 0, -torch.inf
    expected = merge_in_double([Partial(out, lse) for out, lse in zip(outs, lses, strict=True)])
    compare(Partial(*merge_partials(outs, lses)), expected, dtype)
