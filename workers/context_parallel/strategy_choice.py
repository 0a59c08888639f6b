"""Choice of a step's strategy by estimated duration. No torch, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.spec.step_messages import ScheduledRequest, StepShape
from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.context_parallel.cost_model import ModelShape, Rates, estimate_step_s
from workers.context_parallel.shard_plan import make_step_shape, plan_shards, shape_of_plan

MIN_GAIN = 0.02
"""Minimum relative gain for which a step is divided. Below it, every rank computes everything."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """Shape of a step, and the reasons for its strategy."""

    shape: StepShape
    estimate_s: float | None
    """Expected time of the step; None if there was only one strategy."""
    estimates_s: Mapping[Strategy, float]
    """Estimates of every strategy that was considered."""


Choose = Callable[[Sequence[ScheduledRequest]], StrategyChoice]
"""Function from the scheduled requests of a step to its shape."""


def undivided(scheduled: Sequence[ScheduledRequest]) -> StrategyChoice:
    """Return the shape of a step in which every rank computes every token; a ``Choose``."""
    return StrategyChoice(make_step_shape(scheduled), None, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChooser:
    """Chooser for the steps of one replica; a ``Choose``."""

    setting: StrategySetting
    cp: int
    shape: ModelShape
    rates: Rates
    mode: CpMode = CpMode.GATHER
    passing: PassingSetting = PassingSetting.AUTO

    def __call__(self, scheduled: Sequence[ScheduledRequest]) -> StrategyChoice:
        num_new = sum(len(request.token_ids) for request in scheduled)
        num_cached = sum(request.first_position for request in scheduled)
        choices = [
            choose(scheduled, self.cp, self.shape, self.rates, self.setting.candidates, passing)
            for passing in self._passings(num_new, num_cached)
        ]
        return min(choices, key=lambda choice: choice.estimate_s or 0.0)

    def _passings(self, num_new: int, num_cached: int) -> Sequence[Passing | None]:
        if self.mode is CpMode.GATHER or self.cp == 1:
            return [None]
        # The rule is about hiding behind attention; where nothing hides, the estimates decide.
        if self.passing is PassingSetting.AUTO and self.rates.hidden_share:
            return [choose_passing(num_new, num_cached, self.cp, self.shape, self.rates)]
        return self.passing.candidates


def choose(
    scheduled: Sequence[ScheduledRequest],
    cp: int,
    shape: ModelShape,
    rates: Rates,
    candidates: Sequence[Strategy] = tuple(Strategy),
    passing: Passing | None = None,
) -> StrategyChoice:
    """Return the candidate with the least estimate; a gain under MIN_GAIN does not justify an exchange."""
    strategies = candidates if cp > 1 else (Strategy.NONE,)
    plans = {strategy: plan_shards(scheduled, strategy, cp) for strategy in strategies}
    estimates_s = {strategy: estimate_step_s(plan, shape, rates, passing) for strategy, plan in plans.items()}
    best = min(estimates_s, key=lambda strategy: estimates_s[strategy])
    undivided_s = estimates_s.get(Strategy.NONE)
    if undivided_s is not None and estimates_s[best] > undivided_s * (1 - MIN_GAIN):
        best = Strategy.NONE
    return StrategyChoice(shape_of_plan(plans[best], scheduled, passing), estimates_s[best], estimates_s)


def choose_passing(num_new: int, num_cached: int, cp: int, shape: ModelShape, rates: Rates) -> Passing:
    """Return what to pass for T new tokens on P cached ones, by the rule of Context Parallelism for Scalable
    Million-Token Inference (arXiv 2411.01783, algorithm 5).

    With C the attention FLOP/s of a rank, B its bytes/s, N ranks, Hq and Hk heads of e-byte elements, keys and values
    hide behind attention if T >= N C Hk e / (2 Hq B), and are fewer bytes than queries and the partials that return if
    T / (T + P) >= 2 Hk / Hq - 4 T B / (N C e).
    """
    group_flops_per_byte = cp * rates.attention_flops_per_s / rates.exchange_bytes_per_s
    if num_new * shape.attention_flops >= group_flops_per_byte * shape.kv_row_bytes:
        return Passing.PASS_KV
    missed = num_new / max(num_new + num_cached, 1)
    homeward = num_new * shape.attention_flops / (group_flops_per_byte * shape.q_row_bytes)
    return Passing.PASS_KV if missed >= shape.kv_row_bytes / shape.q_row_bytes - homeward else Passing.PASS_Q
