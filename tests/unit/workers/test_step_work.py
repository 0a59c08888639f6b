"""What ranks and their experts have computed: who tells it, when, and what the replica adds up to."""

import torch
from torch import nn

from cluster.spec.config import ParallelConfig
from cluster.spec.step_messages import StepWork
from tests.unit.workers.test_feed_forward import HIDDEN, MOE
from tests.unit.workers.test_replica_leader import leader_of
from workers.layers.feed_forward import MoeBlock
from workers.loop.rank_steps import StepReports
from workers.parallel.model_groups import ModelGroups


def model_of(parallel: ParallelConfig, rank: int, num_layers: int = 2) -> tuple[nn.Module, ModelGroups]:
    groups = ModelGroups(parallel=parallel, global_rank=rank)
    return nn.Sequential(*(MoeBlock(HIDDEN, MOE, groups) for _ in range(num_layers))), groups


def compute(model: nn.Module, *tokens: int) -> None:
    """Count tokens of each local expert, in every layer."""
    for block in model.children():
        assert isinstance(block, MoeBlock)
        block.experts.loads += torch.tensor(tokens)


def test_layers_add_up_under_the_models_own_numbers_and_warming_up_is_left_out() -> None:
    model, groups = model_of(ParallelConfig(tp=2, ep=2), rank=1)
    compute(model, 100, 100)
    reports = StepReports(model, groups, global_rank=1)
    compute(model, 3, 5)
    reports.count(0.25)
    assert reports.next(10.0, is_idle=False) == StepWork(
        global_rank=1, num_steps=1, step_s=0.25, expert_tokens={2: 6, 3: 10}
    )


def test_news_are_told_once_a_second_or_when_nothing_else_is_to_be_done() -> None:
    model, groups = model_of(ParallelConfig(), rank=0)
    reports = StepReports(model, groups, global_rank=0)
    assert reports.next(0.0, is_idle=True) is None
    reports.count(0.5)
    first = reports.next(0.5, is_idle=False)
    assert first == StepWork(global_rank=0, num_steps=1, step_s=0.5)
    compute(model, 0, 0, 0, 1)
    reports.count(0.25)
    assert reports.next(1.4, is_idle=False) is None
    told = StepWork(global_rank=0, num_steps=2, step_s=0.75, expert_tokens={3: 2})
    assert reports.next(1.4, is_idle=True) == told
    reports.count(0.25)
    assert reports.next(1.6, is_idle=False) is None
    assert reports.next(2.6, is_idle=False) is not None
    assert reports.next(9.0, is_idle=False) is None


def test_of_ranks_that_share_an_experts_width_one_tells() -> None:
    model, groups = model_of(ParallelConfig(tp=2), rank=1)
    reports = StepReports(model, groups, global_rank=1)
    compute(model, 1, 1, 1, 1)
    reports.count(0.5)
    assert reports.next(10.0, is_idle=True) == StepWork(global_rank=1, num_steps=1, step_s=0.5)


def test_a_replicas_ranks_add_up_and_the_newest_word_counts() -> None:
    replica, _ = leader_of(2)
    for rank, tokens in ((0, {0: 1, 1: 2}), (1, {1: 4, 2: 8}), (0, {0: 3, 1: 2})):
        replica.on_message(StepWork(global_rank=rank, num_steps=3 + rank, step_s=0.5, expert_tokens=tokens), 0.0)
    load = replica.load()
    assert load.expert_tokens == {0: 3, 1: 6, 2: 8}
    assert [(times.global_rank, times.num_steps, times.total_s) for times in load.computed] == [
        (0, 3, 0.5),
        (1, 4, 0.5),
    ]


def test_what_is_kept_out_of_a_followers_inbox_is_told_and_counted() -> None:
    model, groups = model_of(ParallelConfig(), rank=0)
    reports = StepReports(model, groups, global_rank=1)
    dropped = {"stranger": 2}
    told = reports.next(0.0, is_idle=True, dropped=dropped)
    assert told == StepWork(global_rank=1, num_steps=0, step_s=0.0, dropped=dropped)
    assert reports.next(5.0, is_idle=True, dropped=dropped) is None
    replica, _ = leader_of(2)
    replica.on_message(told, 0.0)
    replica.on_message(StepWork(global_rank=2, num_steps=0, step_s=0.0, dropped={"stranger": 1, "large": 1}), 0.0)
    assert replica.load().dropped == {"stranger": 3, "large": 1}
