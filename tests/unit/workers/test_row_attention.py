"""Attention to contiguous keys: the tile of each (query, key) pair, compared with reference attention."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.spec.strategy import Strategy
from workers.attention.merge import Partial
from workers.attention.runs import Piece, Run, row_pieces, sees_any
from workers.context_parallel.shard_plan import make_shard_plan

KV_HEADS, GROUPS, DIM = 2, 3, 8

Seen = NDArray[np.bool_]


def request_positions(runs: list[Run]) -> NDArray[np.int64]:
    """Return (request, position) of every row."""
    rows = [(run.request, run.first_position + j * run.step) for run in runs for j in range(run.count)]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def seen_by_definition(queries: list[Run], keys: list[Run], window: int | None = None) -> Seen:
    q, k = request_positions(queries)[:, None], request_positions(keys)[None]
    seen: Seen = (q[..., 0] == k[..., 0]) & (k[..., 1] <= q[..., 1])
    return seen if window is None else seen & (k[..., 1] > q[..., 1] - window)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Run], list[Run], list[int]]:
    """Return the runs of two ranks, perhaps the same one, and the lengths of prefixes."""
    requests = draw(st.lists(st.tuples(st.integers(0, 23), st.integers(0, 12)), min_size=1, max_size=4))
    extend_lens, prefix_lens = zip(*requests, strict=True)
    cp = draw(st.integers(1, 5))
    plan = make_shard_plan(draw(st.sampled_from(Strategy)), extend_lens, prefix_lens, cp)
    mine, theirs = (plan.runs[draw(st.integers(0, cp - 1))] for _ in range(2))
    return list(mine), list(theirs), list(prefix_lens)


@st.composite
def rank_pairs(draw: st.DrawFn) -> tuple[list[Run], list[Run]]:
    """Return one rank's queries, and as keys a part of each prefix and another rank's new rows."""
    mine, theirs, prefix_lens = draw(plans())
    owned = [draw(st.integers(0, prefix)) for prefix in prefix_lens]
    return mine, [*(Run(number, 0, count, 1) for number, count in enumerate(owned)), *theirs]


def new_rows() -> st.SearchStrategy[tuple[list[Run], list[Run]]]:
    """Return one rank's queries, and as keys another rank's new rows."""
    return plans().map(lambda plan: plan[:2])


def pairs_in(pieces: list[Piece], shape: tuple[int, ...]) -> NDArray[np.int64]:
    counts = np.zeros(shape, dtype=np.int64)
    for piece in pieces:
        part = counts[piece.query, piece.key]
        assert part.size
        query, key = np.arange(piece.num_queries)[:, None] * piece.step, np.arange(piece.num_keys)
        seen = key <= piece.ahead + query
        if piece.behind is not None:
            seen &= key >= piece.behind + query
        assert seen.any(0).all() or piece.behind is None
        assert seen.any(1).all()
        assert not piece.is_full or seen.all()
        part += seen
    return counts


@settings(deadline=None, max_examples=100)
@given(rank_pairs())
def test_every_visible_pair_is_in_exactly_one_piece(case: tuple[list[Run], list[Run]]) -> None:
    expected = seen_by_definition(*case)
    np.testing.assert_array_equal(pairs_in(row_pieces(*case), expected.shape), expected)


@settings(deadline=None, max_examples=100)
@given(new_rows(), st.integers(1, 20))
def test_pieces_end_where_a_window_does(case: tuple[list[Run], list[Run]], window: int) -> None:
    expected = seen_by_definition(*case, window)
    np.testing.assert_array_equal(pairs_in(row_pieces(*case, window), expected.shape), expected)


@settings(deadline=None, max_examples=200)
@given(rank_pairs())
def test_whether_any_key_is_seen_is_known_from_the_runs(case: tuple[list[Run], list[Run]]) -> None:
    assert sees_any(*case) == bool(seen_by_definition(*case).any())


def test_runs_of_different_steps_that_overlap_are_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="whose step differs"):
        row_pieces([Run(0, 0, 4, 2)], [Run(0, 1, 4, 3)])


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen, scale: float | None = None
) -> Partial:
    """Return attention in float64 over ``[rows, heads, dim]``. None means the usual scale."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->qhk", query, key) * (query.shape[2] ** -0.5 if scale is None else scale)
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
