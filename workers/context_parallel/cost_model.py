"""What a step would take with each strategy, and which one is best. No torch, no I/O.

The estimate of one plan: a fixed part, and for each layer the slowest rank's linear and attention work, the storing of
all new KV, and the exchange. Ranks meet in every layer, so the slowest one sets the pace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.context_parallel.runs import Run
from workers.context_parallel.shard_plan import ShardPlan, make_shard_plan
from workers.models.config import ModelConfig

MIN_GAIN = 0.02
"""Least part of the time that dividing a step must be expected to save; below it every rank computes everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The work of a model, by its shape."""

    num_layers: int
    linear_flops: int
    """Of one token in one layer."""
    attention_flops: int
    """Of one (query, key) pair in one layer, over all heads."""
    kv_row_bytes: int
    """K and V of one token in one layer."""

    @classmethod
    def of(cls, config: ModelConfig, dtype: str) -> "ModelShape":
        """The shape of a model computed in a dtype."""
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        weights = 2 * q_size + 2 * kv_size + 3 * config.intermediate_size
        return cls(
            num_layers=config.num_layers,
            linear_flops=2 * config.hidden_size * weights,
            attention_flops=4 * q_size,
            kv_row_bytes=2 * kv_size * DTYPE_BYTES[dtype],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one rank is. The defaults stand in for what could not be measured: one CPU core, ranks on one host."""

    step_s: float = 4e-3
    """What a step takes however little is computed, over all layers."""
    linear_flops_per_s: float = 1e11
    attention_flops_per_s: float = 5e10
    run_s: float = 8e-5
    """What attention of one run takes in one layer however short it is; a run of step n counts n times."""
    row_s: float = 5e-7
    """Storing the KV of one token in one layer."""
    exchange_s: float = 3e-4
    """One collective, however little it moves."""
    exchange_bytes_per_s: float = 1e9
    """By the bytes that one rank receives."""


@dataclass(frozen=True, slots=True)
class Choice:
    """With which strategy a step runs, and why."""

    strategy: Strategy
    estimate_s: float | None
    """Expected time of the step; None where there was nothing to choose."""
    estimates_s: Mapping[Strategy, float]
    """Of every strategy that was considered."""
    passing: Passing | None = None
    """How queries meet keys where KV is sharded; None where it is replicated."""


Choose = Callable[[Sequence[int], Sequence[int]], Choice]
"""From the extend and prefix lengths of a step to its strategy."""


def fixed(strategy: Strategy) -> Choose:
    """The same strategy for every step, without an estimate."""
    return lambda _extend_lens, _prefix_lens: Choice(strategy, None, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChooser:
    """Chooses for the steps of one replica; a ``Choose``."""

    setting: StrategySetting
    cp: int
    shape: ModelShape
    rates: Rates
    mode: CpMode = CpMode.GATHER
    passing: PassingSetting = PassingSetting.AUTO

    def __call__(self, extend_lens: Sequence[int], prefix_lens: Sequence[int]) -> Choice:
        choice = choose(extend_lens, prefix_lens, self.cp, self.shape, self.rates, self.setting.candidates)
        is_ring = self.mode is CpMode.RING and self.cp > 1
        return replace(choice, passing=self.passing.candidates[0]) if is_ring else choice


def choose(
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    cp: int,
    shape: ModelShape,
    rates: Rates,
    candidates: Sequence[Strategy] = tuple(Strategy),
) -> Choice:
    """The candidate with the least estimate, except that a gain under MIN_GAIN is not worth an exchange."""
    estimates_s = {
        strategy: estimate_step_s(make_shard_plan(strategy, extend_lens, prefix_lens, cp), shape, rates)
        for strategy in (candidates if cp > 1 else (Strategy.NONE,))
    }
    best = min(estimates_s, key=lambda strategy: estimates_s[strategy])
    undivided_s = estimates_s.get(Strategy.NONE)
    if undivided_s is not None and estimates_s[best] > undivided_s * (1 - MIN_GAIN):
        best = Strategy.NONE
    return Choice(best, estimates_s[best], estimates_s)


def estimate_step_s(plan: ShardPlan, shape: ModelShape, rates: Rates) -> float:
    """Expected time of one step of one replica, from its plan to the last rank's result."""
    distinct = plan.runs[:1] if plan.replicated else plan.runs
    compute_s = max(sum(_run_s(run, shape, rates) for run in runs) for runs in distinct)
    exchange_s = 0.0 if plan.replicated else _exchange_s(plan, shape, rates)
    layer_s = compute_s + plan.num_tokens * rates.row_s + exchange_s
    join_s = 0.0 if plan.replicated else rates.exchange_s
    return rates.step_s + shape.num_layers * layer_s + join_s


def attended_pairs(run: Run) -> int:
    """(query, key) pairs of a run: the query at position p sees the keys at 0..p."""
    return run.count * (run.first_position + 1) + run.step * (run.count * (run.count - 1) // 2)


def _run_s(run: Run, shape: ModelShape, rates: Rates) -> float:
    """Linear and attention work of one run in one layer."""
    linear_s = run.count * shape.linear_flops / rates.linear_flops_per_s
    attention_s = attended_pairs(run) * shape.attention_flops / rates.attention_flops_per_s
    return linear_s + attention_s + run.step * rates.run_s


def _exchange_s(plan: ShardPlan, shape: ModelShape, rates: Rates) -> float:
    """The gather of one layer: each rank receives the padded rows of all others."""
    received = (plan.cp - 1) * plan.padded_len * shape.kv_row_bytes
    return rates.exchange_s + received / rates.exchange_bytes_per_s
