"""Selected keys, and attention to them on several ranks (threads), compared with a sort of all keys."""

import weakref
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_oracle import HEAD_DIM, check_scenario
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.selection_oracle import SelectedRun, SelectedScenario
from tests.fakes.thread_group import on_thread_ranks
from workers.attention import torch_selection
from workers.attention.runs import Run
from workers.attention.selection import (
    NO_KEY,
    Chosen,
    IndexQueries,
    are_among_best,
    attend_rows,
    best_keys,
    index_scores,
)
from workers.attention.torch_backend import TorchAttention
from workers.engine.owned_pages import OwnedPages
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.selected_keys import SelectableKeys
from workers.engine.weights import load_model
from workers.memory.page_pool import PagePool
from workers.parallel.communicator import Communicator

scenarios = st.integers(1, 3).flatmap(
    lambda num_requests: st.builds(
        SelectedScenario,
        chunks=st.lists(st.tuples(*[st.integers(0, 11)] * num_requests), min_size=1, max_size=3).map(tuple),
        strategy=st.sampled_from(Strategy),
        cp=st.integers(1, 4),
        passing=st.sampled_from([None, *Passing]),
        page_size=st.sampled_from([1, 4, 8]),
        seed=st.integers(0, 99),
        value_dim=st.sampled_from([HEAD_DIM, 6]),
        top_k=st.sampled_from([1, 3, 7]),
        shares=st.booleans(),
    )
)


def brute_force(scores: list[float], top_k: int) -> list[int]:
    """Return the indices of the highest scores, of equal ones the first, in ascending order."""
    return sorted(sorted(range(len(scores)), key=lambda key: (-scores[key], key))[:top_k])


@given(scenario=scenarios, in_background=st.booleans(), most=st.sampled_from([1, 40, 1 << 22]))
def test_every_context_attends_to_the_keys_that_a_sort_selects(
    scenario: SelectedScenario, in_background: bool, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_selection, "MOST_SCORED", most)
        patch.setattr(torch_selection, "MOST_SELECTED", most)
        results = on_thread_ranks(
            scenario.cp, lambda group: SelectedRun(scenario, group).run(), in_background=in_background
        )
    check_scenario(scenario, results)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("passing", [None, *Passing])
@pytest.mark.parametrize("strategy", Strategy)
def test_eight_ranks_select_the_same_keys(strategy: Strategy, passing: Passing | None, shares: bool) -> None:
    """First there are more ranks than tokens, then prefixes without pages on some ranks."""
    scenario = SelectedScenario(((3, 1, 0), (0, 21, 2), (34, 1, 9)), strategy, 8, passing, top_k=5, shares=shares)
    check_scenario(scenario, on_thread_ranks(8, lambda group: SelectedRun(scenario, group).run()))


def _chosen(scores: Sequence[float], keys: Sequence[int]) -> Chosen:
    """Return keys of one query."""
    return Chosen(torch.tensor([scores]), torch.tensor([keys], dtype=torch.int64))


few_scores = st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0]), min_size=1, max_size=30)


@given(scores=few_scores, top_k=st.integers(1, 12))
def test_of_equal_scores_the_first_are_best(scores: list[float], top_k: int) -> None:
    found = best_keys(_chosen(scores, range(len(scores))), top_k)
    assert found.keys[0].tolist() == brute_force(scores, top_k)
    assert found.scores[0].tolist() == [scores[key] for key in found.keys[0]]


@given(scores=few_scores, top_k=st.integers(1, 12), owners=st.lists(st.integers(0, 2), min_size=30, max_size=30))
def test_ranks_agree_on_the_best_of_all_their_keys(scores: list[float], top_k: int, owners: list[int]) -> None:
    shares = [[key for key in range(len(scores)) if owners[key] == owner] for owner in range(3)]
    own = [best_keys(_chosen([scores[key] for key in share], share), top_k) for share in shares]
    padding = Chosen(torch.full((1, top_k), -torch.inf), torch.full((1, top_k), NO_KEY))
    everyone = Chosen(*(torch.cat(parts, dim=1) for parts in zip(*own, padding, strict=True)))
    kept = [found.keys[are_among_best(found, everyone, top_k)].tolist() for found in own]
    assert sorted(chain.from_iterable(kept)) == brute_force(scores, top_k)


@given(num_queries=st.integers(1, 9), num_keys=st.integers(0, 9), seed=st.integers(0, 99))
def test_scores_are_weighted_sums_over_heads(num_queries: int, num_keys: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    q, keys = (torch.randn(*shape, 6, generator=random) for shape in ((num_queries, 3), (num_keys,)))
    weights = torch.randn(num_queries, 3, generator=random)
    expected = [
        [sum(w * (head @ key).relu() for w, head in zip(weight, heads, strict=True)) for key in keys]
        for weight, heads in zip(weights, q, strict=True)
    ]
    found = index_scores(IndexQueries(q, weights), keys)
    torch.testing.assert_close(found, torch.tensor(expected).view(num_queries, num_keys))


def test_scores_that_are_not_numbers_rank_last_and_break_nothing() -> None:
    index = IndexQueries(torch.full((1, 1, 2), torch.inf), torch.tensor([[1.0]]))
    scores = index_scores(index, torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    assert scores.isfinite().all()
    assert best_keys(Chosen(scores, torch.arange(2)[None]), 1).keys.tolist() == [[1]]


def test_a_query_without_rows_gets_the_empty_partial() -> None:
    found = attend_rows(torch.ones(2, 3, 4), torch.ones(2, 5, 4), torch.tensor([[True] * 5, [False] * 5]), 1.0, 2)
    assert found.out[1].eq(0).all()
    assert found.lse[1].eq(-torch.inf).all()
    torch.testing.assert_close(found.out[0], torch.ones(3, 2))


@given(
    owners=st.integers(1, 5),
    base=st.integers(0, 4),
    page_size=st.sampled_from([1, 3, 8]),
    num_tokens=st.integers(0, 60),
)
def test_owners_cover_all_tokens_once(owners: int, base: int, page_size: int, num_tokens: int) -> None:
    every: list[int] = []
    for owner in range(owners):
        owned = OwnedPages(owners, ((owner - base) % owners,), page_size)
        held = [t for t in range(num_tokens) if (base + t // page_size) % owners == owner]
        counts = owned.num_held(0, np.arange(num_tokens + 1))
        assert counts.tolist() == [sum(t < count for t in held) for count in range(num_tokens + 1)]
        assert owned.positions(owned.firsts[0], torch.arange(len(held))).tolist() == held
        every += held
    assert sorted(every) == list(range(num_tokens))


def test_memory_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores exist for at most MOST_SCORED products at a time, whatever the number of queries and keys."""
    most, sizes = 4096, list[int]()

    def counted(index: IndexQueries, keys: torch.Tensor) -> torch.Tensor:
        sizes.append(index.weights.numel() * len(keys))
        return index_scores(index, keys)

    monkeypatch.setattr(torch_selection, "MOST_SCORED", most)
    monkeypatch.setattr(torch_selection, "index_scores", counted)
    num_keys, page_size = 1000, 8
    keys = torch.randn(num_keys // page_size, 1, page_size, 4)
    selectable = SelectableKeys(
        TorchAttention(),
        [Run(0, num_keys - 200, 200, 1)],
        [torch.arange(num_keys // page_size)],
        OwnedPages(1, (0,), page_size),
    )
    selectable.select(IndexQueries(torch.randn(200, 2, 4), torch.randn(200, 2)), keys, 5)
    assert max(sizes) <= most


@pytest.mark.parametrize("passing", [None, *Passing])
def test_dummy_steps_may_be_longer_than_a_selection(passing: Passing | None, tmp_path: Path) -> None:
    """Every page of such a step is a null page."""
    folder = make_checkpoint(tmp_path, "glm_moe_dsa")
    ownership = KvOwnership.REPLICATED if passing is None else KvOwnership.SHARDED

    def run(group: Communicator) -> bool:
        model = load_model(folder)
        pool = PagePool.of_one_rank(model.config.kv_geometry("dummy", "float32", 4), 3)
        runner = ModelRunner(model, pool, TorchAttention(), RankGroups(cp=group), ownership)
        runner.run_dummy(21, 50, Strategy.ZIGZAG, passing)
        runner.run_dummy(2, 16, Strategy.ZIGZAG, passing, 5)
        return any(bool(part[:3].any()) for layer in range(4) for part in pool.layer_view(layer))

    assert on_thread_ranks(3, run) == [False] * 3


def test_a_selection_is_freed_before_the_next_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    select, made, alive = SelectableKeys.select, list[weakref.ref[torch.Tensor]](), list[int]()

    def select_counting(self: SelectableKeys, index: IndexQueries, keys: torch.Tensor, top_k: int) -> torch.Tensor:
        alive.append(sum(selection() is not None for selection in made))
        selection = select(self, index, keys, top_k)
        made.append(weakref.ref(selection))
        return selection

    monkeypatch.setattr(SelectableKeys, "select", select_counting)
    model = load_model(make_checkpoint(tmp_path, "deepseek_v32"))
    pool = PagePool.of_one_rank(model.config.kv_geometry("dummy", "float32", 4), 3)
    ModelRunner(model, pool, TorchAttention(), RankGroups()).run_dummy(40)
    assert alive[:2] == [0, 0]
