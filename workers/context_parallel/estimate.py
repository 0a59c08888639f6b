"""Estimated duration of a step under a plan. No torch, no I/O.

It is a fixed part plus, for each layer, the slowest rank's linear and attention work, the rows it stores and merges,
the sums over its TP group, and the part of the CP exchange that is not hidden behind work. Ranks synchronize in every
layer, so the slowest one sets the pace. In the last layer nearly all tokens have only K and V, behind which nothing
hides.
"""

from collections.abc import Iterator
from typing import NamedTuple

from cluster.spec.strategy import Passing
from workers.attention.runs import RankRuns, Run
from workers.context_parallel.rates import ALL_REDUCES, ModelShape, Rates
from workers.context_parallel.shard_plan import ShardPlan

TILE = 256
"""Queries and keys per tile of a kernel."""


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
    """Work of one rank in one layer."""

    tokens: int
    pairs: float
    calls: int
    """Attention calls, run one after another."""
    partials: int
    """Partials of each token; a single one is not merged."""
    rows: float
    """Rows of KV stored, or read to be sent."""


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
