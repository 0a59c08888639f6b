"""Choice of the strategy and passing that take the least time. No torch, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.context_parallel.estimate import estimate_step_s
from workers.context_parallel.rates import ModelShape, Rates
from workers.context_parallel.shard_plan import make_shard_plan

MIN_GAIN = 0.02
"""Least relative gain for which a step is divided; below it every rank computes everything."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Strategy of a step, and the reasons for it."""

    strategy: Strategy
    estimate_s: float | None
    """Expected time of the step; None if there was no choice."""
    estimates_s: Mapping[Strategy, float]
    """Estimates of every strategy that was considered."""
    passing: Passing | None = None
    """Passing of queries or keys if KV is sharded; None if it is replicated."""


Choose = Callable[[Sequence[int], Sequence[int]], Choice]
"""Function from the extend and prefix lengths of a step to its strategy."""


def fixed(strategy: Strategy) -> Choose:
    """Return a chooser that always takes one strategy, without an estimate."""
    return lambda _extend_lens, _prefix_lens: Choice(strategy, None, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChooser:
    """Chooser for the steps of one replica; a ``Choose``."""

    setting: StrategySetting
    cp: int
    shape: ModelShape
    rates: Rates
    mode: CpMode = CpMode.GATHER
    passing: PassingSetting = PassingSetting.AUTO

    def __call__(self, extend_lens: Sequence[int], prefix_lens: Sequence[int]) -> Choice:
        choices = [
            choose(extend_lens, prefix_lens, self.cp, self.shape, self.rates, self.setting.candidates, passing)
            for passing in self._passings(sum(extend_lens), sum(prefix_lens))
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
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    cp: int,
    shape: ModelShape,
    rates: Rates,
    candidates: Sequence[Strategy] = tuple(Strategy),
    passing: Passing | None = None,
) -> Choice:
    """Return the candidate with the least estimate; a gain under MIN_GAIN does not justify an exchange."""
    estimates_s = {
        strategy: estimate_step_s(make_shard_plan(strategy, extend_lens, prefix_lens, cp), shape, rates, passing)
        for strategy in (candidates if cp > 1 else (Strategy.NONE,))
    }
    best = min(estimates_s, key=lambda strategy: estimates_s[strategy])
    undivided_s = estimates_s.get(Strategy.NONE)
    if undivided_s is not None and estimates_s[best] > undivided_s * (1 - MIN_GAIN):
        best = Strategy.NONE
    return Choice(best, estimates_s[best], estimates_s, passing)


def choose_passing(num_new: int, num_cached: int, cp: int, shape: ModelShape, rates: Rates) -> Passing:
    """Return what to pass for T new tokens on P cached ones, by the rule of Context Parallelism for Scalable
    Million-Token
    Inference (arXiv 2411.01783, algorithm 5).

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
