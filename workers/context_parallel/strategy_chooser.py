"""Choice of the strategy that the cost model expects to be fastest. No torch, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.spec.config import PrefillConfig
from cluster.spec.step_messages import ScheduledRequest, StepShape
from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.context_parallel.cost_model import ModelShape, Rates, estimate_step_s
from workers.context_parallel.shard_plan import ShardPlan, make_step_shape, plan_shards, shape_of_plan

MIN_GAIN = 0.02
"""Minimum relative gain for dividing a step. Below it, every rank computes everything."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """Shape of a step, and the estimate that led to the choice of strategy."""

    shape: StepShape
    estimate_s: float | None
    """Expected time of the step. None if nothing was estimated."""


Choose = Callable[[Sequence[ScheduledRequest]], StrategyChoice]
"""Function from a step's scheduled requests to the step's shape."""


def undivided(scheduled: Sequence[ScheduledRequest]) -> StrategyChoice:
    """Return the shape of a step in which every rank computes every token. Implements ``Choose``."""
    return StrategyChoice(make_step_shape(scheduled), None)


@dataclass(slots=True, kw_only=True)
class StrategyChooser:
    """Chooser of the fastest strategy for one replica's steps. Implements ``Choose``."""

    setting: StrategySetting
    cp: int
    shape: ModelShape
    rates: Rates
    mode: CpMode = CpMode.GATHER
    passing: PassingSetting = PassingSetting.AUTO
    _strategies: Sequence[Strategy] = field(init=False)
    _passings: Sequence[Passing | None] = field(init=False)

    @classmethod
    def of(cls, prefill: PrefillConfig, shape: ModelShape, rates: Rates) -> "StrategyChooser":
        return cls(
            setting=prefill.strategy,
            cp=prefill.parallel.cp,
            shape=shape,
            rates=rates,
            mode=prefill.mode,
            passing=prefill.passing,
        )

    def __post_init__(self) -> None:
        self._strategies = self.setting.candidates if self.cp > 1 else (Strategy.NONE,)
        self._passings = self.passing.candidates if self.mode is CpMode.RING and self.cp > 1 else (None,)

    def __call__(self, scheduled: Sequence[ScheduledRequest]) -> StrategyChoice:
        plans = {strategy: plan_shards(scheduled, strategy, self.cp) for strategy in self._strategies}
        choices = [self._choose(scheduled, plans, passing) for passing in self._passings]
        return min(choices, key=lambda choice: choice.estimate_s or 0.0)

    def _choose(
        self, scheduled: Sequence[ScheduledRequest], plans: Mapping[Strategy, ShardPlan], passing: Passing | None
    ) -> StrategyChoice:
        """Return the strategy with the lowest estimate. A gain under MIN_GAIN does not justify an exchange."""
        estimates_s = {
            strategy: estimate_step_s(plan, self.shape, self.rates, passing) for strategy, plan in plans.items()
        }
        best = min(estimates_s, key=lambda strategy: estimates_s[strategy])
        undivided_s = estimates_s.get(Strategy.NONE)
        if undivided_s is not None and estimates_s[best] > undivided_s * (1 - MIN_GAIN):
            best = Strategy.NONE
        return StrategyChoice(shape_of_plan(plans[best], scheduled, passing), estimates_s[best])
