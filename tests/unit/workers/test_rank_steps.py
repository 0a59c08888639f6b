"""In which order one rank does the parts of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan, StepShape
from cluster.spec.tiers import TierJob, TierJobKind
from workers.loop.rank_steps import RankSteps
from workers.loop.watch import BETWEEN_STEPS, Heartbeat

SAMPLED = {Room(1): Sampled(token_id=7)}
ARRIVALS = "arrivals"
LAYERS = "layers that are stored"


class FakeParts:
    """Rank, runner, step, sender, tier worker and clock in one; notes calls and where the loop says to be."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.heartbeat = Heartbeat()
        self.runner = self.step_recorder = self
        self.requests = {Room(1): "known"}
        self._now_s = 0.0

    def before_step(self, plan: StepPlan) -> None:
        self._note("cached pages leave", plan.step)

    def submit_layerwise(self, job: TierJob) -> str:
        self._note("layerwise load", job.job_id)
        return ARRIVALS

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        self._note("recorded from", plan.step)
        yield
        self._note("recorded to", plan.step)

    def during_step(self, _plan: StepPlan, requests: object) -> str:
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
        assert self.heartbeat.place != BETWEEN_STEPS, call
        self.calls.append(call)


def plan_of(step: int, fill: TierJob | None = None) -> StepPlan:
    return StepPlan(step=step, shape=StepShape(), admits=[], scheduled=[], releases=[], layerwise_load=fill)


@pytest.fixture
def parts() -> FakeParts:
    return FakeParts()


@pytest.fixture
def steps(parts: FakeParts) -> RankSteps:
    fake: Any = parts
    return RankSteps(fake, fake, fake, fake, parts.heartbeat)


def test_cached_pages_leave_before_the_forward_and_computed_ones_when_it_has_ended(
    parts: FakeParts, steps: RankSteps
) -> None:
    steps.begin(plan_of(3))
    begun = [("cached pages leave", 3), ("recorded from", 3), ("forward", 3, None), ("recorded to", 3)]
    assert (parts.calls, steps.num_begun, parts.heartbeat.place) == (begun, 1, BETWEEN_STEPS)
    ended = steps.end()
    assert parts.calls[len(begun) :] == [("wait",), ("computed pages leave", 3)]
    assert (ended.plan.step, ended.sampled, ended.seconds) == (3, SAMPLED, 1.0)
    assert (steps.num_begun, parts.heartbeat.place) == (0, BETWEEN_STEPS)


def test_the_forward_gets_what_tells_that_its_pages_have_come(parts: FakeParts, steps: RankSteps) -> None:
    steps.begin(plan_of(3, TierJob(job_id=5, kind=TierJobKind.LOAD, pages=[])))
    assert parts.calls[1:] == [
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


def test_time_that_two_steps_were_under_way_counts_once(steps: RankSteps) -> None:
    """The clock goes on by a second at each look."""
    steps.begin(plan_of(3))
    steps.begin(plan_of(4))
    assert [steps.end().seconds, steps.end().seconds] == [2.0, 1.0]
