"""The native backend compared with reference attention in float64: any shapes, strides, pages and runs.

The tests run in bf16 and fp32, for each kind of processor that this one supports, and for AMX by a model of it.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.amx import kinds_to_test
from tests.fakes.attention_params import params_for
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
from tests.unit.workers.test_row_attention import masked_attention, rank_pairs, seen_by_definition, tensors
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial
from workers.attention.native_backend import NativeAttention
from workers.attention.runs import Run
from workers.attention.selection import Chosen, IndexQueries, QueryRun, best_keys
from workers.native.compile import Compiler, find_compiler

pytestmark = pytest.mark.native

OUT_TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-5}
LSE_TOLERANCE = {torch.bfloat16: 1e-3, torch.float32: 1e-5}


@pytest.fixture(scope="module", params=kinds_to_test(), ids=lambda kind: kind.name)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    return Compiler(find_compiler().path, request.param)


@pytest.fixture(scope="module")
def native(compiler: Compiler) -> AttentionBackend:
    return NativeAttention(compiler)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def draw(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_close(result: Partial, expected: Partial) -> None:
    dtype = result.out.dtype
    out_tolerance, lse_tolerance = OUT_TOLERANCE[dtype], LSE_TOLERANCE[dtype]
    assert result.lse.dtype == torch.float32
    np.testing.assert_allclose(result.out.double(), expected.out, atol=out_tolerance, rtol=out_tolerance)
    np.testing.assert_allclose(result.lse.double(), expected.lse, atol=lse_tolerance, rtol=1e-5)


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: Run, scale: float | None = None
) -> Partial:
    """Return attention of one run's queries to the keys of its request ``[tokens, heads, dim]``."""
    positions = run.first_position + np.arange(run.count) * run.step
    return masked_attention(query, key, value, positions[:, None] >= np.arange(len(key)), scale)


class Pages:
    """Requests in the pages of one pool, whose other slots are NaN. ``gap`` dims separate the rows of two heads.

    With ``value_dim``, values are the first elements of their keys.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        lengths: list[int],
        kv_heads: int,
        head_dim: int,
        page_size: int,
        gap: int = 0,
        seed: int = 1,
        value_dim: int | None = None,
    ) -> None:
        counts = [-(-length // page_size) for length in lengths]
        pool = kv_pool(sum(counts) + 1, kv_heads, 2, page_size, head_dim + gap, dtype)
        pool.group("full_attention").fill_(torch.nan)
        key_pages, value_pages = (view[..., :head_dim] for view in pool.layer_view(1))
        self.views = key_pages, value_pages
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
        self.tables = torch.split(order, counts)
        kv = [draw(dtype, seed + number, length, 2, kv_heads, head_dim) for number, length in enumerate(lengths)]
        for table, each in zip(self.tables, kv, strict=True):
            for position in range(len(each)):
                for view, rows in zip(self.views, each[position], strict=True):
                    view[table[position // page_size], :, position % page_size] = rows
        self.kv = [(each[:, 0], each[:, 1]) for each in kv]
        """Keys and values of each request, ``[tokens, heads, dim]``."""
        if value_dim is not None:
            self.views = key_pages, key_pages[..., :value_dim]
            self.kv = [(key, key[..., :value_dim]) for key, _ in self.kv]


@st.composite
def some_runs(draw: st.DrawFn) -> tuple[list[Run], list[int]]:
    """Return runs of up to three requests in any order, and the requests' lengths."""
    runs, lengths = [], []
    for number in range(draw(st.integers(1, 3))):
        count, step = draw(st.sampled_from([(1, 1), (1, 1), (7, 3), (40, 1), (150, 2), (300, 1)]))
        runs.append(Run(number, draw(st.integers(0, 400)), count, step))
        lengths.append(runs[-1].last_position + 1 + draw(st.integers(0, 20)))
    return draw(st.permutations(runs)), lengths


@settings(deadline=None, max_examples=25)
@given(
    some_runs(),
    st.sampled_from([(64, None), (80, 64), (96, None), (128, 32), (256, None), (8, None), (33, 7), (576, 512)]),
    st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3), (1, 8), (1, 7)]),
    st.sampled_from([16, 64, 128, 5]),
    st.sampled_from([0, 1, 64]),
    st.integers(0, 99),
)
def test_runs_over_pages(
    native: AttentionBackend,
    dtype: torch.dtype,
    case: tuple[list[Run], list[int]],
    dims: tuple[int, int | None],
    heads: tuple[int, int],
    page_size: int,
    gap: int,
    seed: int,
) -> None:
    runs, lengths = case
    head_dim, value_dim = dims
    pages = Pages(dtype, lengths, heads[0], head_dim, page_size, gap, seed, value_dim)
    num_queries = sum(run.count for run in runs)
    query = draw(dtype, seed + 50, num_queries, heads[0] * heads[1] + 1, head_dim + gap)[:, 1:, :head_dim]
    result = native.prepare(runs, pages.tables, page_size).attend(query, *pages.views, params_for(query))
    start = 0
    for run in runs:
        mine = slice(start, start + run.count)
        key, value = (x[: run.last_position + 1] for x in pages.kv[run.request])
        check_close(Partial(result.out[mine], result.lse[mine]), by_definition(query[mine], key, value, run))
        start += run.count


@pytest.mark.parametrize("score", [3.0, 14.0, 24.0, 90.0])
def test_rows_that_see_nothing_of_the_last_block_keep_their_sums(
    native: AttentionBackend, dtype: torch.dtype, score: float
) -> None:
    """One key in the block before has a much larger score, and so a larger weight, than the others."""
    run, marked = Run(0, 440, 16, 1), 386
    pages = Pages(dtype, [run.last_position + 1], 1, 64, 16)
    ((key, value),) = pages.kv
    for position in range(len(key)):
        key[position] = score / 8 if position == marked else 0.0
        pages.views[0][pages.tables[0][position // 16], :, position % 16] = key[position]
    query = torch.ones(run.count, 1, 64, dtype=dtype)
    result = native.prepare([run], pages.tables, 16).attend(query, *pages.views, params_for(query))
    check_close(result, by_definition(query, key, value, run))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=3), st.integers(1, 60), st.integers(0, 99))
def test_all_queries_see_the_first_keys(
    native: AttentionBackend, dtype: torch.dtype, key_lens: list[int], num_queries: int, seed: int
) -> None:
    pages = Pages(dtype, key_lens, 2, 64, 16, seed=seed)
    runs = [Run(number, 3, num_queries, 1) for number in range(len(key_lens))]
    query = draw(dtype, seed + 50, num_queries * len(key_lens), 4, 64)
    result = native.prepare(runs, pages.tables, 16, key_lens).attend(query, *pages.views, params_for(query))
    for number, (key, value) in enumerate(pages.kv):
        mine = slice(number * num_queries, (number + 1) * num_queries)
        seen = np.ones((num_queries, len(key)), dtype=bool)
        expected = masked_attention(query[mine], key, value, seen)
        check_close(Partial(result.out[mine], result.lse[mine]), expected)


@settings(deadline=None, max_examples=60)
@given(choice_cases)
def test_the_best_keys_are_those_of_the_reference(
    native: AttentionBackend, dtype: torch.dtype, case: ChoiceCase
) -> None:
    check_choice(native, case, dtype)


@settings(deadline=None, max_examples=20)
@given(st.integers(1000, 6000), st.sampled_from([1, 60, 500]), st.integers(0, 99))
def test_the_best_of_many_keys(
    native: AttentionBackend, dtype: torch.dtype, num_before: int, top_k: int, seed: int
) -> None:
    check_choice(native, ChoiceCase((3, 2, 9), num_before, top_k, 64, seed), dtype)


@pytest.mark.parametrize("kept", [256, 300, 1024])
def test_a_wrong_estimate_changes_nothing(native: AttentionBackend, dtype: torch.dtype, kept: int) -> None:
    """Scores by which the choice is estimated, those of every fourth key, are higher than others."""
    scores = torch.ones(1024)
    scores[::4], scores[1:100:4] = 7.0, 3.0
    keys = scores.to(dtype).view(16, 1, 64, 1)
    index, rows = IndexQueries(torch.ones(1, 1, 1, dtype=dtype), torch.ones(1, 1)), slice(0, 1)
    step = native.prepare_selection([QueryRun(rows, torch.arange(16), np.array([1024]))])
    expected = best_keys(Chosen(scores[None], torch.arange(1024)[None]), kept)
    found = step.best_keys(index, keys, rows, kept)
    assert found.keys.tolist() == expected.keys.tolist()
    assert found.scores.tolist() == expected.scores.tolist()


def test_keys_whose_scores_are_not_numbers_are_the_worst(native: AttentionBackend, dtype: torch.dtype) -> None:
    keys = torch.ones(4, 1, 16, 8, dtype=dtype)
    keys[0, 0, 3], keys[2, 0, 5] = torch.nan, torch.inf
    index, rows = IndexQueries(torch.ones(1, 2, 8, dtype=dtype), torch.ones(1, 2)), slice(0, 1)
    found = native.prepare_selection([QueryRun(rows, torch.arange(4), np.array([64]))]).best_keys(index, keys, rows, 63)
    assert found.keys[0].tolist() == [key for key in range(64) if key != 3]
    assert found.scores.isfinite().all()
    assert found.scores[0].argmax() == 36


@settings(deadline=None, max_examples=30)
@given(attention_cases)
def test_attention_to_selected_keys(native: AttentionBackend, dtype: torch.dtype, case: AttentionCase) -> None:
    found, wanted = attend(native, case, dtype)
    if dtype == torch.float32:  # an element may be off by more than others
        check_near(found.out, wanted.out, wanted.rounded, num_rows=wanted.lse.numel())
    else:
        np.testing.assert_allclose(found.out.double(), wanted.out, atol=OUT_TOLERANCE[dtype], rtol=OUT_TOLERANCE[dtype])
    np.testing.assert_allclose(found.lse.double(), wanted.lse, atol=LSE_TOLERANCE[dtype], rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(rank_pairs())
def test_runs_that_share_a_query_are_merged(
    native: AttentionBackend, dtype: torch.dtype, case: tuple[list[Run], list[Run]]
) -> None:
    seen = seen_by_definition(*case)
    num_queries, num_keys = seen.shape
    query, key, value = tensors(num_queries, num_keys, dtype)
    result = native.prepare_rows(*case).attend(query, key, value, params_for(query))
    check_close(result, masked_attention(query, key, value, seen))


def test_many_tiles_and_threads_find_the_same(
    native: AttentionBackend, dtype: torch.dtype, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    pages = Pages(dtype, [900, 700], 2, 64, 64)
    runs, query = [Run(0, 0, 900, 1), Run(1, 699, 1, 1)], draw(dtype, 2, 901, 8, 64)
    of_one, of_three = (
        backend.prepare(runs, pages.tables, 64).attend(query, *pages.views, params_for(query))
        for backend in (native, NativeAttention(compiler))
    )
    assert torch.equal(of_one.out, of_three.out)
    assert torch.equal(of_one.lse, of_three.lse)


@pytest.mark.parametrize("num_queries", [1, 200])
@pytest.mark.parametrize("size", [1.0, 300.0, 3000.0, -3000.0])
def test_a_late_needle_far_above_all_before(
    native: AttentionBackend, dtype: torch.dtype, num_queries: int, size: float
) -> None:
    query, key, value = draw(dtype, 0, num_queries, 4, 64).abs(), draw(dtype, 1, 500, 1, 64), draw(dtype, 2, 500, 1, 64)
    key[:] += size / 64
    key[230] = 2 * abs(size) / 64
    run = Run(0, 500 - num_queries, num_queries, 1)
    result = native.prepare_rows([run], [Run(0, 0, 500, 1)]).attend(query, key, value, params_for(query))
    check_close(result, by_definition(query, key, value, run))


@pytest.mark.parametrize("num_queries", [1, 100])
def test_a_visible_nan_is_not_hidden(native: AttentionBackend, dtype: torch.dtype, num_queries: int) -> None:
    for number in range(2):
        key, value = draw(dtype, 1, 200, 1, 64), draw(dtype, 2, 200, 1, 64)
        (key, value)[number][150, 0, 5] = torch.nan
        run = Run(0, 200 - num_queries, num_queries, 1)
        query = draw(dtype, 3, num_queries, 2, 64)
        out, lse = native.prepare_rows([run], [Run(0, 0, 200, 1)]).attend(query, key, value, params_for(query))
        before = max(150 - run.first_position, 0)
        assert out[before:].isnan().any(-1).all()
        assert not lse[:before].isnan().any()
        assert not key.isnan().any() or lse[before:].isnan().all()


@pytest.mark.parametrize("num_queries", [1, 30])
def test_any_scale_and_no_window(native: AttentionBackend, dtype: torch.dtype, num_queries: int) -> None:
    query, key, value = draw(dtype, 0, num_queries, 4, 64), draw(dtype, 1, 100, 2, 64), draw(dtype, 2, 100, 2, 64)
    run = Run(0, 100 - num_queries, num_queries, 1)
    rows = native.prepare_rows([run], [Run(0, 0, 100, 1)])
    check_close(rows.attend(query, key, value, AttentionParams(0.3)), by_definition(query, key, value, run, 0.3))
    with pytest.raises(AssertionError, match="a window of 5 tokens"):
        rows.attend(query, key, value, AttentionParams(0.3, 5))


def test_out_of_bounds_input_is_refused_before_it_is_read(native: AttentionBackend, dtype: torch.dtype) -> None:
    pages, query = Pages(dtype, [40], 1, 64, 16), draw(dtype, 2, 1, 2, 64)
    with pytest.raises(AssertionError, match="ends past its pages"):
        native.prepare([Run(0, 48, 1, 1)], pages.tables, 16)
    step = native.prepare([Run(0, 39, 1, 1)], [torch.tensor([0, 1, 99])], 16)
    with pytest.raises(AssertionError, match="page 99 is not in"):
        step.attend(query, *pages.views, params_for(query))
    with pytest.raises(AssertionError, match="0 queries"):
        step.attend(query[:0], *pages.views, params_for(query))
    with pytest.raises(AssertionError, match=r"tensors have dtypes .*float64"):
        native.prepare([Run(0, 39, 1, 1)], pages.tables, 16).attend(query.double(), *pages.views, params_for(query))


def test_no_runs_yield_no_rows(native: AttentionBackend, dtype: torch.dtype) -> None:
    pages = Pages(dtype, [3], 1, 64, 16)
    query = draw(dtype, 0, 0, 2, 64)
    paged = native.prepare([], [], 16).attend(query, *pages.views, params_for(query))
    rows = native.prepare_rows([], []).attend(query, *pages.kv[0], params_for(query))
    assert paged.out.shape == rows.out.shape == (0, 2, 64)
