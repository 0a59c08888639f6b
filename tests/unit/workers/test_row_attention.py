"""Keys in rows: which piece a (query, key) pair is in, and attention over them and over prefixes by definition."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.spec.strategy import Strategy
from tests.fakes.kv import kv_pool
from workers.attention import blocked
from workers.attention.pieces import visible_pieces
from workers.attention.registry import load_backend
from workers.context_parallel.merge import Partial
from workers.context_parallel.runs import Run, sees_any
from workers.context_parallel.shard_plan import make_shard_plan

KV_HEADS, GROUPS, DIM = 2, 3, 8

Seen = NDArray[np.bool_]


def places(runs: list[Run]) -> NDArray[np.int64]:
    """(request, position) of every row."""
    rows = [(run.request, run.first_position + j * run.step) for run in runs for j in range(run.count)]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def seen_by_definition(queries: list[Run], keys: list[Run]) -> Seen:
    q, k = places(queries)[:, None], places(keys)[None]
    seen: Seen = (q[..., 0] == k[..., 0]) & (k[..., 1] <= q[..., 1])
    return seen


@st.composite
def rank_pairs(draw: st.DrawFn) -> tuple[list[Run], list[Run]]:
    """The queries of one rank of a plan, and as keys a part of each prefix and the new rows of another rank."""
    requests = draw(st.lists(st.tuples(st.integers(0, 23), st.integers(0, 12)), min_size=1, max_size=4))
    extend_lens, prefix_lens = zip(*requests, strict=True)
    cp = draw(st.integers(1, 5))
    plan = make_shard_plan(draw(st.sampled_from(Strategy)), extend_lens, prefix_lens, cp)
    mine, theirs = (plan.runs[draw(st.integers(0, cp - 1))] for _ in range(2))
    owned = [draw(st.integers(0, prefix)) for prefix in prefix_lens]
    return list(mine), [*(Run(number, 0, count, 1) for number, count in enumerate(owned)), *theirs]


@settings(deadline=None, max_examples=400)
@given(rank_pairs())
def test_every_visible_pair_is_in_exactly_one_piece(case: tuple[list[Run], list[Run]]) -> None:
    expected = seen_by_definition(*case)
    counts = np.zeros(expected.shape, dtype=np.int64)
    for piece in visible_pieces(*case):
        part = counts[piece.query, piece.key]
        assert part.size
        part += 1 if piece.ahead is None else np.tril(np.ones(part.shape, dtype=np.int64), piece.ahead)
    np.testing.assert_array_equal(counts, expected)


@settings(deadline=None, max_examples=200)
@given(rank_pairs())
def test_whether_any_key_is_seen_is_known_from_the_runs(case: tuple[list[Run], list[Run]]) -> None:
    assert sees_any(*case) == bool(seen_by_definition(*case).any())


def test_runs_of_different_steps_that_overlap_are_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="whose step is another"):
        visible_pieces([Run(0, 0, 4, 2)], [Run(0, 1, 4, 3)])


def masked_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen) -> Partial:
    """Attention in float64 over ``[rows, heads, dim]``."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->qhk", query, key) / query.shape[2] ** 0.5
    scores = scores.masked_fill(~torch.from_numpy(seen)[:, None], -torch.inf)
    return Partial(torch.einsum("qhk,khd->qhd", scores.softmax(-1).nan_to_num(), value), scores.logsumexp(-1))


def check(result: Partial, expected: Partial, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(result.out.double().numpy(), expected.out.numpy(), atol=atol)
    np.testing.assert_allclose(result.lse.double().numpy(), expected.lse.numpy(), atol=atol)
    assert result.lse.dtype == torch.float32


def tensors(num_queries: int, num_keys: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    kv = torch.randn(num_keys, 2, KV_HEADS, DIM).to(dtype)
    return torch.randn(num_queries, KV_HEADS * GROUPS, DIM).to(dtype), kv[:, 0], kv[:, 1]


@settings(deadline=None, max_examples=60)
@given(rank_pairs())
def test_rows_equal_attention_by_definition(case: tuple[list[Run], list[Run]]) -> None:
    seen = seen_by_definition(*case)
    num_queries, num_keys = seen.shape
    query, key, value = tensors(num_queries, num_keys, torch.float32)
    result = load_backend("torch").prepare_rows(*case).attend(query, key, value)
    check(result, masked_attention(query, key, value, seen))


@pytest.mark.parametrize("min_products", [1, 1 << 60])
def test_rows_in_bf16_keep_their_dtype(min_products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MIN_PRODUCTS", min_products)
    runs = [Run(0, 3, 40, 1)], [Run(0, 0, 3, 1), Run(0, 3, 20, 1), Run(1, 0, 9, 1)]
    seen = seen_by_definition(*runs)
    num_queries, num_keys = seen.shape
    query, key, value = tensors(num_queries, num_keys, torch.bfloat16)
    result = load_backend("torch").prepare_rows(*runs).attend(query, key, value)
    assert result.out.dtype == torch.bfloat16
    check(result, masked_attention(query, key, value, seen), atol=0.03)


@settings(deadline=None, max_examples=60)
@given(rank_pairs(), st.sampled_from([1, 4]), st.data())
def test_all_queries_see_the_first_keys_in_the_pages(
    case: tuple[list[Run], list[Run]], page_size: int, data: st.DataObject
) -> None:
    runs, _ = case
    num_requests = 1 + max((run.request for run in runs), default=0)
    key_lens = data.draw(st.lists(st.integers(0, 9), min_size=num_requests, max_size=num_requests))
    page_counts = [-(-length // page_size) for length in key_lens]
    pool = kv_pool(sum(page_counts), KV_HEADS, 2, page_size, DIM, torch.float32)
    pool.group("full_attention").fill_(torch.nan)
    tables = torch.split(torch.randperm(sum(page_counts)), page_counts)
    key_request = np.repeat(np.arange(num_requests), key_lens)
    query, key, value = tensors(len(places(runs)), len(key_request), torch.float32)
    for number, (start, end) in enumerate(pairwise(np.cumsum([0, *key_lens]))):
        place = torch.arange(end - start)
        slots = tables[number][place // page_size] * page_size + place % page_size
        pool.write(1, slots, torch.stack((key[start:end], value[start:end]), 1))
    step = load_backend("torch").prepare(runs, tables, page_size, key_lens)
    result = step.attend(query, *pool.layer_view(1))
    check(result, masked_attention(query, key, value, places(runs)[:, :1] == key_request[None]))
