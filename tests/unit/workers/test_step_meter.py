"""What the leader's heartbeat says of its steps."""

from cluster.spec.messages import StepPlan
from cluster.spec.registry import StepTimes
from cluster.spec.strategy import Strategy
from workers.scheduler.step_meter import StepMeter


def plan(strategy: Strategy, estimate_s: float | None) -> StepPlan:
    return StepPlan(step=1, strategy=strategy, admits=[], rows=[], releases=[], estimate_s=estimate_s)


def test_steps_are_booked_by_strategy() -> None:
    meter = StepMeter()
    meter.after_step(plan(Strategy.ZIGZAG, 1.0), 1.5)
    told = meter.times
    meter.after_step(plan(Strategy.ZIGZAG, 2.0), 1.75)
    meter.after_step(plan(Strategy.NONE, 0.25), 0.5)
    assert told == {
        Strategy.ZIGZAG: StepTimes(num_steps=1, total_s=1.5, total_estimate_s=1.0, last_s=1.5, last_estimate_s=1.0)
    }
    assert meter.times == {
        Strategy.ZIGZAG: StepTimes(num_steps=2, total_s=3.25, total_estimate_s=3.0, last_s=1.75, last_estimate_s=2.0),
        Strategy.NONE: StepTimes(num_steps=1, total_s=0.5, total_estimate_s=0.25, last_s=0.5, last_estimate_s=0.25),
    }


def test_a_step_without_an_estimate_is_not_booked() -> None:
    meter = StepMeter()
    meter.after_step(plan(Strategy.NONE, None), 1.0)
    assert meter.times == {}
