"""How long the leader's steps took beside what was expected of them, by strategy. No clock of its own."""

from dataclasses import dataclass, field

from cluster.spec.messages import StepPlan
from cluster.spec.registry import StepTimes
from cluster.spec.strategy import Strategy


@dataclass(slots=True)
class StepMeter:
    """Counts the steps that came with an estimate; a decode step has no choice to check."""

    times: dict[Strategy, StepTimes] = field(default_factory=dict)

    def after_step(self, plan: StepPlan, seconds: float) -> None:
        """Book a computed step; ``seconds`` are those of the leader's own rank."""
        if plan.estimate_s is None:
            return
        before = self.times.get(plan.strategy, StepTimes())
        booked = StepTimes(
            num_steps=before.num_steps + 1,
            total_s=before.total_s + seconds,
            total_estimate_s=before.total_estimate_s + plan.estimate_s,
            last_s=seconds,
            last_estimate_s=plan.estimate_s,
        )
        # A new mapping: the lease's thread reads the old one.
        self.times = {**self.times, plan.strategy: booked}
