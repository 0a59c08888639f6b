"""Steps of one rank, and its statistics in heartbeats and traces."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cluster.spec.config import ParallelConfig
from cluster.spec.ids import Room
from cluster.spec.registry import SendTimes, StepTimes
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import ScheduledRequest, SendReport, StepPlan, StepShape, StepWork
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import TierJob, TierJobKind
from cluster.spec.transfer_messages import SendState
from tests.unit.workers.test_feed_forward import HIDDEN, MOE
from tests.unit.workers.test_replica_leader import leader_of
from workers.device import Arriving
from workers.layers.feed_forward import MoeBlock
from workers.loop.rank_steps import RankSteps, StepMeter, StepReports
from workers.loop.watch import BETWEEN_STEPS, LoopProgress
from workers.parallel.model_groups import ModelGroups
from workers.scheduler.prefill_request import SendMeter

SAMPLED = {Room(1): Sampled(token_id=7)}
ARRIVALS = "arrivals"
LAYERS = "layers that are stored"


class FakeParts:
    """Rank, runner, step, sender, tier worker and clock in one. It records calls and the reported phase."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.progress = LoopProgress()
        self.runner = self.memory = self.step_recorder = self
        self.recorder = SimpleNamespace(begin=lambda _: True)
        self.communication_s = 7.0
        self.requests = {Room(1): "known"}
        self._now_s = 0.0

    def before_step(self, plan: StepPlan) -> None:
        self._note("cached pages leave", plan.step)

    def receive(self, pages: list[int]) -> None:
        self._note("received", pages)

    def submit_layerwise(self, job: TierJob) -> str:
        self._note("layerwise load", job.job_id)
        return ARRIVALS

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        self._note("recorded from", plan.step)
        yield
        self._note("recorded to", plan.step)

    def layer_callback(self, _plan: StepPlan, requests: object) -> str:
        assert requests is self.requests
        return LAYERS

    def begin(self, plan: StepPlan, arrivals: str | None, on_stored: str) -> "FakeParts":
        assert on_stored == LAYERS
        self._note("forward", plan.step, arrivals)
        return self

    def wait(self) -> dict[Room, Sampled]:
        self._note("wait")
        return SAMPLED

    def after_step(self, plan: StepPlan, requests: object) -> None:
        assert requests is self.requests
        self._note("computed pages leave", plan.step)

    def now_s(self) -> float:
        self._now_s += 1.0
        return self._now_s

    def _note(self, *call: Any) -> None:
        assert self.progress.position != BETWEEN_STEPS, call
        self.calls.append(call)


def plan_of(step: int, fill: TierJob | None = None, received: Sequence[int] = ()) -> StepPlan:
    return StepPlan(
        step=step,
        shape=StepShape(),
        new_requests=[],
        scheduled=[],
        releases=[],
        layerwise_load=fill,
        received_pages=list(received),
    )


@pytest.fixture
def parts() -> FakeParts:
    return FakeParts()


@pytest.fixture
def steps(parts: FakeParts) -> RankSteps:
    fake: Any = parts
    return RankSteps(fake, fake, fake, fake, parts.progress)


def test_cached_pages_are_sent_before_the_forward_and_computed_ones_after(parts: FakeParts, steps: RankSteps) -> None:
    steps.begin(plan_of(3))
    begun = [
        ("cached pages leave", 3),
        ("received", []),
        ("recorded from", 3),
        ("forward", 3, None),
        ("recorded to", 3),
    ]
    assert (parts.calls, steps.num_begun, parts.progress.position) == (begun, 1, BETWEEN_STEPS)
    ended = steps.end()
    assert parts.calls[len(begun) :] == [("wait",), ("computed pages leave", 3)]
    assert (ended.plan.step, ended.sampled, ended.seconds) == (3, SAMPLED, 1.0)
    assert (steps.num_begun, parts.progress.position) == (0, BETWEEN_STEPS)


def test_the_forward_gets_its_layerwise_load(parts: FakeParts, steps: RankSteps) -> None:
    """Pages are received before, because the load may fill one of them again."""
    steps.begin(plan_of(3, TierJob(job_id=5, kind=TierJobKind.LOAD, pages=[]), received=[4, 0]))
    assert parts.calls[1:] == [
        ("received", [4, 0]),
        ("layerwise load", 5),
        ("recorded from", 3),
        ("forward", 3, ARRIVALS),
        ("recorded to", 3),
    ]


def test_the_oldest_step_ends_first_while_the_next_one_is_begun(parts: FakeParts, steps: RankSteps) -> None:
    for step in (3, 4):
        steps.begin(plan_of(step))
    assert (steps.num_begun, [steps.end().plan.step for _ in range(2)]) == (2, [3, 4])
    assert [call for call in parts.calls if call[0] == "computed pages leave"] == [
        ("computed pages leave", 3),
        ("computed pages leave", 4),
    ]


def test_time_shared_by_two_steps_counts_once(steps: RankSteps) -> None:
    """Each call of the clock advances it by a second."""
    steps.begin(plan_of(3))
    steps.begin(plan_of(4))
    assert [steps.end().seconds, steps.end().seconds] == [2.0, 1.0]


def test_communication_counts_from_the_end_of_one_step_to_that_of_the_next(parts: FakeParts, steps: RankSteps) -> None:
    found = []
    for so_far_s in (7.5, 7.5, 9.0):
        steps.begin(plan_of(3))
        parts.communication_s = so_far_s
        found.append(steps.end().communication_s)
    assert found == [0.5, 0.0, 1.5]


ROWS = [
    ScheduledRequest(
        room=Room(number), first_position=0, token_ids=[5] * number, new_pages=[], samples=False, output_position=0
    )
    for number in (3, 4)
]


def plan(strategy: Strategy, estimate_s: float | None, passing: Passing | None = None) -> StepPlan:
    return StepPlan(
        step=1,
        shape=StepShape(strategy=strategy, passing=passing),
        new_requests=[],
        scheduled=ROWS,
        releases=[],
        estimate_s=estimate_s,
    )


def test_steps_are_booked_by_strategy_and_passing() -> None:
    meter = StepMeter()
    meter.after_step(plan(Strategy.ZIGZAG, 1.0), 1.5)
    reported = meter.times
    meter.after_step(plan(Strategy.ZIGZAG, 2.0), 1.75)
    meter.after_step(plan(Strategy.ZIGZAG, 0.25, Passing.PASS_Q), 0.5)
    assert [(times.num_steps, times.num_tokens, times.total_s) for times in reported] == [(1, 7, 1.5)]
    assert meter.times == (
        StepTimes(
            strategy=Strategy.ZIGZAG,
            num_steps=2,
            num_tokens=14,
            total_s=3.25,
            total_estimate_s=3.0,
            last_s=1.75,
            last_estimate_s=2.0,
        ),
        StepTimes(
            strategy=Strategy.ZIGZAG,
            passing=Passing.PASS_Q,
            num_steps=1,
            num_tokens=7,
            total_s=0.5,
            total_estimate_s=0.25,
            last_s=0.5,
            last_estimate_s=0.25,
        ),
    )


def test_a_step_without_an_estimate_is_not_booked() -> None:
    meter = StepMeter()
    meter.after_step(plan(Strategy.NONE, None), 1.0)
    assert meter.times == ()


def test_sends_are_summed_by_rank() -> None:
    meter = SendMeter()
    for rank, num_bytes, write_s in ((1, 10, 0.5), (0, 4, 0.25), (1, 20, 0.5), (2, 0, 0.0)):
        meter.add(
            SendReport(room=Room(1), sender_rank=rank, state=SendState.SENT, num_bytes=num_bytes, write_s=write_s)
        )
    assert meter.times == (
        SendTimes(global_rank=0, num_transfers=1, num_bytes=4, write_s=0.25),
        SendTimes(global_rank=1, num_transfers=2, num_bytes=30, write_s=1.0),
    )


def model_of(parallel: ParallelConfig, rank: int, num_layers: int = 2) -> tuple[nn.Module, ModelGroups]:
    groups = ModelGroups(parallel=parallel, global_rank=rank)
    return nn.Sequential(*(MoeBlock(HIDDEN, MOE, groups) for _ in range(num_layers))), groups


def compute(model: nn.Module, *tokens: int) -> None:
    """Count tokens for each local expert, in every layer."""
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


def test_reports_are_sent_once_a_second_or_when_idle() -> None:
    model, groups = model_of(ParallelConfig(), rank=0)
    reports = StepReports(model, groups, global_rank=0)
    assert reports.next(0.0, is_idle=True) is None
    reports.count(0.5)
    first = reports.next(0.5, is_idle=False)
    assert first == StepWork(global_rank=0, num_steps=1, step_s=0.5)
    compute(model, 0, 0, 0, 1)
    reports.count(0.25)
    assert reports.next(1.4, is_idle=False) is None
    reported = StepWork(global_rank=0, num_steps=2, step_s=0.75, expert_tokens={3: 2})
    assert reports.next(1.4, is_idle=True) == reported
    reports.count(0.25)
    assert reports.next(1.6, is_idle=False) is None
    assert reports.next(2.6, is_idle=False) is not None
    assert reports.next(9.0, is_idle=False) is None


def test_reports_do_not_wait_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = model_of(ParallelConfig(), rank=0)
    reports = StepReports(model, groups, global_rank=0)
    compute(model, 0, 0, 0, 1)
    reports.count(0.25)
    with monkeypatch.context() as patch:
        patch.setattr(Arriving, "is_there", False)
        assert reports.next(1.0, is_idle=False) is None
    compute(model, 7, 7, 7, 7)
    expected = StepWork(global_rank=0, num_steps=1, step_s=0.25, expert_tokens={3: 2})
    assert reports.next(1.1, is_idle=False) == expected


def test_a_step_that_ends_during_the_copy_is_in_the_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = model_of(ParallelConfig(), rank=0)
    reports = StepReports(model, groups, global_rank=0)
    reports.count(0.25)
    with monkeypatch.context() as patch:
        patch.setattr(Arriving, "is_there", False)
        assert reports.next(1.0, is_idle=False) is None
    compute(model, 0, 0, 0, 1)
    reports.count(0.25)
    assert reports.next(1.1, is_idle=True) == StepWork(global_rank=0, num_steps=2, step_s=0.5)
    expected = StepWork(global_rank=0, num_steps=2, step_s=0.5, expert_tokens={3: 2})
    assert reports.next(2.1, is_idle=True) == expected
    assert reports.next(3.1, is_idle=True) is None


def test_one_rank_reports_for_all_that_share_an_experts_width() -> None:
    model, groups = model_of(ParallelConfig(tp=2), rank=1)
    reports = StepReports(model, groups, global_rank=1)
    compute(model, 1, 1, 1, 1)
    reports.count(0.5)
    assert reports.next(10.0, is_idle=True) == StepWork(global_rank=1, num_steps=1, step_s=0.5)


def test_load_is_summed_over_the_latest_reports_of_a_replicas_ranks() -> None:
    replica, _ = leader_of(2)
    for rank, tokens in ((0, {0: 1, 1: 2}), (1, {1: 4, 2: 8}), (0, {0: 3, 1: 2})):
        replica.on_message(StepWork(global_rank=rank, num_steps=3 + rank, step_s=0.5, expert_tokens=tokens), 0.0)
    load = replica.load()
    assert load.expert_tokens == {0: 3, 1: 6, 2: 8}
    assert [(times.global_rank, times.num_steps, times.total_s) for times in load.computed] == [
        (0, 3, 0.5),
        (1, 4, 0.5),
    ]


def test_messages_rejected_by_a_followers_inbox_are_logged_and_counted() -> None:
    model, groups = model_of(ParallelConfig(), rank=0)
    reports = StepReports(model, groups, global_rank=1)
    dropped = {"stranger": 2}
    reported = reports.next(0.0, is_idle=True, dropped=dropped)
    assert reported == StepWork(global_rank=1, num_steps=0, step_s=0.0, dropped=dropped)
    assert reports.next(5.0, is_idle=True, dropped=dropped) is None
    replica, _ = leader_of(2)
    replica.on_message(reported, 0.0)
    replica.on_message(StepWork(global_rank=2, num_steps=0, step_s=0.0, dropped={"stranger": 1, "large": 1}), 0.0)
    assert replica.load().dropped == {"stranger": 3, "large": 1}
