"""A handmade step batch, and writing and attending on several ranks (threads) compared with the oracle."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_oracle import HEAD_DIM, Scenario, ScenarioRun, Stored, check_scenario
from tests.fakes.attention_params import params_for
from tests.fakes.devices import use_meta_device
from tests.fakes.kv import kv_pool, store_kv
from tests.fakes.steps import Request, step_of
from tests.fakes.thread_group import on_thread_ranks
from workers.attention.runs import Run
from workers.attention.torch_backend import TorchAttention
from workers.context_parallel.exchange import RowGather, join_rows
from workers.context_parallel.shard_plan import TokenLocation, make_shard_plan
from workers.device import CPU
from workers.engine import step_keys
from workers.engine.attention_context import make_context
from workers.engine.batch import StepBatch, build_step_batch
from workers.engine.step_context import CpExchange
from workers.memory import page_pool
from workers.parallel.communicator import Communicator


def build(requests: list[Request], strategy: Strategy, cp: int, cp_rank: int) -> StepBatch:
    return build_step_batch(
        step_of(requests, strategy, cp), cp=cp, cp_rank=cp_rank, page_size=4, null_slot=40, device=CPU
    )


REQUESTS = [
    Request([11, 12, 13, 14, 15], 6, [7, 3, 9], samples=True),
    Request([21], 0, [5], samples=False),
    Request([31], 3, [1], samples=True),
]


def test_a_batch_by_hand() -> None:
    batch = build(REQUESTS, Strategy.ZIGZAG, 2, 0)
    assert batch.token_ids.tolist() == [11, 12, 15, 21, 31]
    assert batch.positions.tolist() == [6, 7, 10, 0, 3]
    assert batch.pages[0].slots.tolist() == [14, 15, 38, 20, 7, 36, 37, 40, 40, 40]
    assert [sample.location for sample in batch.sampled] == [TokenLocation(0, 2), TokenLocation(0, 4)]
    assert [table.tolist() for table in batch.pages[0].tables] == [[7, 3, 9], [5], [1]]


def test_a_narrowed_batch_has_only_queries_of_sampled_tokens() -> None:
    first, second = (build(REQUESTS, Strategy.ZIGZAG, 2, rank).narrowed() for rank in (0, 1))
    assert first.query_rows is not None
    assert first.query_rows.tolist() == [2, 4]
    assert first.runs == (Run(0, 10, 1, 1), Run(2, 3, 1, 1))
    assert second.query_rows is not None
    assert (second.query_rows.tolist(), second.runs) == ([], ())
    assert first.narrowed() is first


def test_a_batch_whose_tokens_are_all_sampled_stays_as_it_is() -> None:
    requests = [Request([31], 3, [1], samples=True), Request([41], 0, [2], samples=True)]
    batch = build(requests, Strategy.NONE, 2, 1)
    assert batch.narrowed() is batch


def test_ranks_agree_on_everything_but_their_share() -> None:
    first, second = build(REQUESTS, Strategy.INTERLEAVE, 2, 0), build(REQUESTS, Strategy.INTERLEAVE, 2, 1)
    assert first.shards == second.shards
    assert first.sampled == second.sampled
    assert torch.equal(first.pages[0].slots, second.pages[0].slots)
    assert sorted(first.token_ids.tolist() + second.token_ids.tolist()) == [11, 12, 13, 14, 15, 21, 31]


def test_no_rows_make_an_empty_batch() -> None:
    batch = build([], Strategy.ZIGZAG, 2, 1)
    assert (batch.token_ids.shape, batch.pages[0].slots.shape, batch.runs, batch.sampled) == ((0,), (0,), (), ())


def test_too_few_pages_are_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="request 0 has 1 pages but needs 2"):
        build([Request([1, 2], 3, [0], samples=True)], Strategy.NONE, 1, 0)


scenarios = st.integers(1, 4).flatmap(
    lambda num_requests: st.builds(
        Scenario,
        chunks=st.lists(st.tuples(*[st.integers(0, 11)] * num_requests), min_size=1, max_size=3).map(tuple),
        strategy=st.sampled_from(Strategy),
        cp=st.integers(1, 4),
        passing=st.sampled_from([None, *Passing]),
        page_size=st.sampled_from([1, 4, 8]),
        seed=st.integers(0, 99),
        value_dim=st.sampled_from([HEAD_DIM, 6, 12]),
        stored=st.just(Stored.KEYS_AND_VALUES),
    )
)
one_part_scenarios = st.builds(
    replace,
    scenarios,
    value_dim=st.sampled_from([HEAD_DIM, 6]),
    stored=st.sampled_from([Stored.KEYS, Stored.LATENTS]),
)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("passing", [None, *Passing])
@pytest.mark.parametrize("strategy", Strategy)
def test_a_step_does_not_wait_for_the_gpu(
    strategy: Strategy, passing: Passing | None, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors raise if their content is needed. Kernels replace plain torch."""
    meta = use_meta_device(monkeypatch)
    kernels = SimpleNamespace(store_kv=lambda _pages, slots, kv: stored.append((len(slots), len(kv))))
    monkeypatch.setattr(page_pool, "elementwise_kernels", lambda _: kernels)
    stored: list[Any] = []
    moved = SimpleNamespace(wait=lambda: True)
    backend: Any = SimpleNamespace(in_background=in_background, all_gather=lambda *_: moved, shift=lambda *_: moved)
    exchange = CpExchange(Communicator("cp", 1, 2, backend))
    pool = kv_pool(10, 2, 2, 4, 8, torch.float32, device=meta.torch_device)
    batch = build_step_batch(
        step_of([REQUESTS[0]._replace(pages=[7, 3, 8]), *REQUESTS[1:]], strategy, 2, passing),
        cp=2,
        cp_rank=1,
        page_size=4,
        null_slot=pool.null_slot,
        device=meta,
        owners=1 if passing is None else 2,
    )
    context = make_context(batch, pool, TorchAttention(), exchange)
    q, kv = (torch.empty(len(batch.token_ids), heads, 8, device="meta") for heads in (4, 2))
    context.put(0, kv, kv)
    out = context.attend(0, q, params_for(q))
    assert context.gather_sampled(out).shape == (2, 4, 8)
    assert join_rows(exchange.group, batch.shards, out).shape == (7, 4, 8)
    num_rows = sum(num_rows for num_rows, _ in stored)
    # Three of seven tokens are new in page 8, which rank 0 owns.
    assert num_rows == 4 if passing else num_rows >= 7
    assert all(slots == rows for slots, rows in stored)


@given(scenarios, st.booleans())
def test_any_chunks_strategy_passing_and_cp_equal_the_oracle(scenario: Scenario, in_background: bool) -> None:
    results = on_thread_ranks(
        scenario.cp, lambda group: ScenarioRun(scenario, group).run(), in_background=in_background
    )
    check_scenario(scenario, results)


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("strategy", Strategy)
def test_kernels_write_rows_where_they_are_stored_or_sent_from(
    strategy: Strategy, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_pool, "elementwise_kernels", lambda _: SimpleNamespace(store_kv=store_kv))
    scenario = Scenario(((9, 1, 0), (8, 1, 13), (1, 2, 1)), strategy, cp)
    check_scenario(scenario, on_thread_ranks(cp, lambda group: ScenarioRun(scenario, group).run(), in_background=False))


@given(one_part_scenarios, st.booleans(), st.integers(1, 9))
def test_values_inside_keys_and_keys_expanded_in_tiles_equal_the_oracle(
    scenario: Scenario, in_background: bool, most_expanded: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_keys, "MOST_EXPANDED", most_expanded)
        results = on_thread_ranks(
            scenario.cp, lambda group: ScenarioRun(scenario, group).run(), in_background=in_background
        )
    check_scenario(scenario, results)


@pytest.mark.parametrize("passing", [None, *Passing])
@pytest.mark.parametrize("strategy", Strategy)
def test_eight_ranks_equal_the_oracle(strategy: Strategy, passing: Passing | None) -> None:
    """First there are more ranks than tokens, then prefixes without pages on some ranks."""
    scenario = Scenario(((3, 1, 0), (0, 21, 2), (34, 1, 9)), strategy, 8, passing)
    check_scenario(scenario, on_thread_ranks(8, lambda group: ScenarioRun(scenario, group).run()))


@pytest.mark.parametrize("passing", [None, *Passing])
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", Strategy)
def test_bf16_with_prefixes_and_single_tokens(strategy: Strategy, cp: int, passing: Passing | None) -> None:
    scenario = Scenario(((9, 1, 0), (8, 1, 3), (1, 1, 1)), strategy, cp, passing, dtype=torch.bfloat16)
    check_scenario(scenario, on_thread_ranks(cp, lambda group: ScenarioRun(scenario, group).run()))


def test_gather_buffers_serve_steps_of_changing_size_shape_and_dtype() -> None:
    plans = [make_shard_plan(Strategy.CONTIGUOUS, [length], [0], 2) for length in (5, 9, 2, 0)]

    def gather_all(gather: RowGather) -> list[torch.Tensor]:
        out = []
        for plan, dtype in zip(plans, (torch.float32, torch.bfloat16, torch.float32, torch.float32), strict=True):
            rows = torch.from_numpy(plan.local(gather.group.rank)).to(dtype)[:, None, None].expand(-1, 1, 2)
            gathered = gather.start(plan, rows, -rows)
            everything = gathered.wait()[torch.from_numpy(plan.inverse)]
            assert torch.equal(torch.cat([gathered.of_rank(0), gathered.of_rank(1)]), everything)
            out.append(everything)
        return out

    for results in on_thread_ranks(2, lambda group: gather_all(RowGather(group))):
        for plan, gathered in zip(plans, results, strict=True):
            assert gathered[:, 0, 0].tolist() == list(range(plan.num_tokens))
            assert gathered[:, 0, 3].tolist() == [-token for token in range(plan.num_tokens)]


@pytest.mark.parametrize("strategy", Strategy)
def test_joined_rows_come_in_batch_order_on_every_rank(strategy: Strategy) -> None:
    plan = make_shard_plan(strategy, [7, 1, 4], [0, 2, 9], 3)
    batch = torch.arange(24.0).view(12, 2)
    joined = on_thread_ranks(3, lambda group: join_rows(group, plan, batch[torch.from_numpy(plan.local(group.rank))]))
    assert all(torch.equal(rows, batch) for rows in joined)
