"""Estimated duration of a step under a plan, and choice of the strategy that takes the least. No torch, no I/O.

An estimate is a fixed part plus, for each layer, the slowest rank's linear and attention work, the rows it stores and
merges, the sums over its TP group, and the part of the CP exchange that is not hidden behind work. Ranks synchronize in
every layer, so the slowest one sets the pace. In the last layer nearly all tokens have only K and V, behind which
nothing hides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.spec.step_messages import ScheduledRequest, StepShape
from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.attention.runs import RankRuns, Run
from workers.context_parallel.shard_plan import ShardPlan, make_step_shape, plan_shards, shape_of_plan

ALL_REDUCES = 2
"""All-reduces of a layer: after attention and after the MLP."""
TILE = 256
"""Queries and keys per kernel tile."""
MIN_GAIN = 0.02
"""Minimum relative gain for which a step is divided. Below it, every rank computes everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Work of a model's layers, or of one rank's share of them."""

    num_layers: int
    linear_flops: int
    """FLOPs of one token in one layer, without attention."""
    kv_flops: int
    """Part of ``linear_flops`` that computes K and V. In the last layer, most tokens need no more."""
    attention_flops: int
    """FLOPs of one (query, key) pair in one layer, over all heads."""
    kv_row_bytes: int
    """Bytes of K and V of one token in one layer."""
    q_row_bytes: int
    """Bytes of the queries of one token in one layer."""

    @property
    def partial_row_bytes(self) -> int:
        """Return bytes of the partial of one token in one layer, in fp32: 4 bytes where a pair takes 4 FLOPs."""
        return self.attention_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of one rank. The defaults replace what could not be measured: one CPU core, ranks on one host."""

    step_s: float = 4e-3
    """Time of a nearly empty step, over all layers."""
    linear_flops_per_s: float = 1e11
    attention_flops_per_s: float = 5e10
    run_s: float = 8e-5
    """Fixed time of one attention call. Over pages, a run of step n takes n calls."""
    row_s: float = 5e-7
    """Time to store or read the KV of one token in one layer."""
    merge_row_s: float = 5e-7
    """Time to merge one partial of one token in one layer."""
    exchange_s: float = 3e-4
    """Fixed time of one collective."""
    exchange_bytes_per_s: float = 1e9
    """Bytes that one rank receives per second."""
    all_reduce_s: float = 0.0
    """Fixed time to sum hidden states over TP ranks; 0 if there is only one."""
    all_reduce_row_s: float = 0.0
    """Additional time of that sum per token; 0 if there is only one TP rank."""
    hidden_share: float = 0.0
    """Share of a collective's time that overlaps with computation; 0 if the ranks copy the data themselves."""


def estimate_step_s(plan: ShardPlan, shape: ModelShape, rates: Rates, passing: Passing | None = None) -> float:
    """Return the expected time of one step of one replica, from its plan to the last rank's result.

    ``passing`` says how queries meet keys if KV is divided over the ranks; None if each rank has all.
    """
    exchanged = list(_exchanges(plan, shape, passing))
    works = [_work(plan, runs, rates, passing) for runs in plan.runs[: 1 if plan.replicated else plan.cp]]
    compute_s = max(_rank_s(work, shape, rates) for work in works)
    hideable_s = compute_s / len(exchanged) if exchanged else 0.0
    layer_s = compute_s + sum(_exposed_s(num_bytes, hideable_s, rates) for num_bytes in exchanged)
    last_s = layer_s
    if passing is not Passing.PASS_Q:
        last_s = max(_kv_s(work, shape, rates) for work in works)
        last_s += sum(_exposed_s(num_bytes, 0.0, rates) for num_bytes in exchanged)
    join_s = 0.0 if plan.replicated else rates.exchange_s
    return rates.step_s + (shape.num_layers - 1) * layer_s + last_s + join_s


def attended_pairs(run: Run) -> int:
    """Count (query, key) pairs of a run: the query at position p sees the keys at 0..p."""
    return run.count * (run.first_position + 1) + run.step * (run.count * (run.count - 1) // 2)


def computed_pairs(run: Run) -> int:
    """Count ``attended_pairs`` and those that kernels compute needlessly in partly visible tiles of queries and keys.

    A run of step n meets n triangles, one for each class of keys by position modulo n.
    """
    return attended_pairs(run) + run.step * (run.count * (min(run.count, TILE) - 1) // 2)


class _Work(NamedTuple):
    tokens: int
    pairs: float
    calls: int
    """Attention calls, run one after another."""
    partials: int
    """Number of partials per token; a single one is not merged."""
    rows: float
    """Number of KV rows stored, or read to be sent."""


def _rank_s(work: _Work, shape: ModelShape, rates: Rates) -> float:
    merged = work.tokens * work.partials if work.partials > 1 else 0
    return (
        work.tokens * shape.linear_flops / rates.linear_flops_per_s
        + work.pairs * shape.attention_flops / rates.attention_flops_per_s
        + work.calls * rates.run_s
        + work.rows * rates.row_s
        + merged * rates.merge_row_s
        + ALL_REDUCES * (rates.all_reduce_s + work.tokens * rates.all_reduce_row_s)
    )


def _kv_s(work: _Work, shape: ModelShape, rates: Rates) -> float:
    """Return the seconds of the last layer, where almost no token has a query."""
    kv_s = work.tokens * shape.kv_flops / rates.linear_flops_per_s
    return kv_s + work.rows * rates.row_s + ALL_REDUCES * rates.all_reduce_s


def _work(plan: ShardPlan, runs: RankRuns, rates: Rates, passing: Passing | None) -> _Work:
    tokens, pairs = sum(run.count for run in runs), sum(computed_pairs(run) for run in runs)
    prefix, has_prefix, num_runs = sum(plan.prefix_lens), any(plan.prefix_lens), len(runs)
    if passing is None:
        if plan.replicated or not rates.hidden_share:
            return _Work(tokens, pairs, sum(run.step for run in runs), 1, plan.num_tokens)
        partials = plan.cp + has_prefix
        return _Work(tokens, pairs, num_runs * partials, partials, plan.num_tokens)
    stored = plan.num_tokens / plan.cp
    if passing is Passing.PASS_KV:
        return _Work(tokens, pairs, num_runs * plan.cp, plan.cp, stored + prefix / plan.cp)
    own_prefix_pairs = sum(run.count * plan.prefix_lens[run.request] for run in runs)
    prefix_pairs = sum(new * old for new, old in zip(plan.extend_lens, plan.prefix_lens, strict=True))
    num_new = 1 if plan.replicated else plan.cp
    # Every rank attends the queries of all ranks over its prefix, one call per request.
    calls = num_runs * num_new + len(plan.extend_lens) * has_prefix
    partials = num_new + plan.cp * has_prefix
    return _Work(tokens, pairs - own_prefix_pairs + prefix_pairs / plan.cp, calls, partials, stored)


def _exchanges(plan: ShardPlan, shape: ModelShape, passing: Passing | None) -> Iterator[float]:
    """Yield the bytes that one rank receives in each collective of a layer."""
    others, prefix = plan.cp - 1, sum(plan.prefix_lens)
    if passing is Passing.PASS_KV:
        rows = prefix / plan.cp + (0 if plan.replicated else plan.padded_len)
        yield from [rows * shape.kv_row_bytes] * (others if rows else 0)
        return
    if not plan.replicated:
        yield others * plan.padded_len * shape.kv_row_bytes
    if passing is Passing.PASS_Q and prefix:
        if not plan.replicated:
            yield others * plan.padded_len * shape.q_row_bytes
        yield others * plan.padded_len * shape.partial_row_bytes


def _exposed_s(num_bytes: float, hideable_s: float, rates: Rates) -> float:
    """Return the seconds of one collective not hidden behind ``hideable_s`` of other work."""
    exchange_s = rates.exchange_s + num_bytes / rates.exchange_bytes_per_s
    return exchange_s - min(exchange_s * rates.hidden_share, hideable_s)


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
