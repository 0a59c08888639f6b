"""Merged partial results equal attention to all keys, in any order and grouping, with empty shards."""

from collections.abc import Sequence
from itertools import pairwise
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.attention.merge import Partial, empty_partial, merge_in_turn

SHAPE = (3, 2, 4)
seeds = st.integers(0, 1000)


def attention(seed: int, keys: slice, scale: float = 1.0) -> Partial:
    """Return reference attention in float64 for some queries and part of 12 keys."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(SHAPE, generator=generator, dtype=torch.float64) * scale
    key, value = torch.randn(2, 12, *SHAPE[1:], generator=generator, dtype=torch.float64)
    scores = torch.einsum("thd,shd->ths", query, key[keys])
    if scores.shape[-1] == 0:
        return empty_partial(query.float())
    out = torch.einsum("ths,shd->thd", scores.softmax(-1), value[keys])
    return Partial(out.float(), scores.logsumexp(-1).float())


def shards(seed: int, cuts: list[int], scale: float = 1.0) -> list[Partial]:
    edges = [0, *sorted(cuts), 12]
    return [attention(seed, slice(a, b), scale) for a, b in pairwise(edges)]


def merge(parts: Sequence[Partial]) -> Partial:
    joined = merge_in_turn(Partial(*(x.clone() for x in part)) for part in parts)
    assert joined is not None
    return joined


def assert_close(got: Partial, wanted: Partial) -> None:
    torch.testing.assert_close(got.out, wanted.out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got.lse, wanted.lse, atol=2e-5, rtol=1e-5)


@settings(deadline=None)
@given(seeds, st.lists(st.integers(0, 12), max_size=5), st.sampled_from([0.0, 1.0, 100.0]))
def test_shards_of_any_size_merge_to_the_whole(seed: int, cuts: list[int], scale: float) -> None:
    assert_close(merge(shards(seed, cuts, scale)), attention(seed, slice(None), scale))


@settings(deadline=None)
@given(seeds, st.lists(st.integers(0, 12), min_size=2, max_size=2), st.permutations(range(3)))
def test_order_and_grouping_do_not_matter(seed: int, cuts: list[int], order: list[int]) -> None:
    parts = shards(seed, cuts)
    a, b, c = (parts[index] for index in order)
    assert_close(merge([merge([a, b]), c]), merge(parts))
    assert_close(merge([a, merge([b, c])]), merge(parts))


@settings(deadline=None)
@given(seeds, st.integers(0, 3))
def test_an_empty_shard_leaves_no_trace(seed: int, index: int) -> None:
    parts = shards(seed, [4, 8])
    empty = empty_partial(parts[0].out)
    assert_close(merge([*parts[:index], empty, *parts[index:]]), merge(parts))


def test_only_empty_shards_merge_to_an_empty_one() -> None:
    merged = merge([empty_partial(torch.ones(SHAPE))] * 3)
    assert torch.equal(merged.out, torch.zeros(SHAPE))
    assert torch.equal(merged.lse, torch.full(SHAPE[:-1], -torch.inf))


def test_rows_may_be_empty_each_in_another_shard() -> None:
    a, b = shards(3, [5])
    a.out[0], a.lse[0] = 0.0, -torch.inf
    b.out[1], b.lse[1] = 0.0, -torch.inf
    merged = merge([a, b])
    torch.testing.assert_close(merged.out[0], b.out[0])
    torch.testing.assert_close(merged.lse[1], a.lse[1])


def test_no_queries_at_all() -> None:
    assert merge([empty_partial(torch.empty(0, 2, 4))] * 2).out.shape == (0, 2, 4)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_extreme_scores_neither_overflow_nor_vanish(shift: float) -> None:
    a, b = shards(5, [6])
    shifted = merge([Partial(a.out, a.lse + shift), Partial(b.out, b.lse + shift)])
    torch.testing.assert_close(shifted.out, merge([a, b]).out, atol=1e-2, rtol=0)
    assert shifted.lse.isfinite().all()


def test_several_partials_are_joined_in_fp32_and_one_is_returned_as_it_is() -> None:
    parts = [Partial(part.out.bfloat16(), part.lse) for part in shards(7, [3])]
    assert [tensor.dtype for tensor in merge(parts)] == [torch.float32] * 2
    assert merge_in_turn(parts[:1]) is parts[0]
    assert merge_in_turn([]) is None


def test_only_two_partials_exist_at_a_time() -> None:
    alive = list[ref[torch.Tensor]]()

    def made(part: Partial) -> Partial:
        alive[:] = [each for each in alive if each() is not None]
        assert len(alive) < 2
        alive.append(ref(part.out))
        return part

    assert merge_in_turn(made(attention(8, slice(key, key + 1))) for key in range(12)) is not None
