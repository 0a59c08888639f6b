"""Estimates of step times under a shard plan.

An estimate is a fixed part plus, for each layer, the slowest rank's linear and attention work, the rows it stores and
merges, the all-reduces of its TP group, and the part of the CP exchange that no work hides. Ranks synchronize in every
layer, so the slowest one sets the pace. In the last layer, nearly all tokens need only K and V, and nothing hides the
exchange. No torch, no I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from cluster.spec.strategy import Passing
from workers.attention.runs import RankRuns, Run
from workers.context_parallel.shard_plan import ShardPlan
from workers.expert_parallel.dispatch_cost import ExpertExchange, ExpertTraffic

CANDIDATE_BYTES = 12
"""Bytes of a key that one rank proposes to the others when they select keys: its score and its position."""
ALL_REDUCES = 2
"""All-reduces per layer: after attention and after the MLP."""
TILE = 256
"""Number of queries and of keys per kernel tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Work of a model's layers, or of one rank's share of them."""

    num_layers: int
    linear_flops: int
    """FLOPs per token in one layer, without attention."""
    kv_flops: int
    """Part of ``linear_flops`` that computes K and V. In the last layer, most tokens need nothing else."""
    attention_flops: int
    """FLOPs per (query, key) pair in one layer, over all heads."""
    kv_row_bytes: int
    """Bytes of K and V per token in one layer."""
    q_row_bytes: int
    """Bytes of queries per token in one layer."""
    partial_row_bytes: int
    """Bytes of the fp32 partial per token in one layer, without its log-sum-exps."""
    expand_flops: int = 0
    """FLOPs per key in one layer that a rank spends to expand a stored key. 0 if keys are used as stored."""
    stored_pair_flops: int = 0
    """FLOPs per (query, key) pair if a layer uses keys as stored."""
    windows: tuple[tuple[int, int], ...] = ()
    """Sliding windows in tokens, ascending, each with its number of layers. All other layers have no window."""
    top_k: int | None = None
    """Maximum number of keys per query, which are used as stored. None if a query uses all visible keys."""
    index_flops: int = 0
    """FLOPs per visible (query, key) pair in one layer to select keys."""
    index_row_bytes: int = 0
    """Bytes of an indexer's queries per token in one layer, as they are passed."""
    index_share: float = 1.0
    """Share of layers that select keys. The others use the keys that a layer before them has selected."""
    weight_bytes: int = 0
    """Bytes of weights that a rank receives for one layer, whatever the step. 0 if every rank stores all weights."""

    expert_flops: int = 0
    """Part of ``linear_flops`` that routed experts take."""
    expert_share: float = 0.0
    """Share of layers that have experts."""
    experts: ExpertExchange | None = None
    """Exchange of tokens between ranks with experts. None if every rank computes its own tokens' experts."""

    @property
    def own_flops(self) -> int:
        """Return the part of ``linear_flops`` that a rank computes for its own tokens."""
        return self.linear_flops - self.expert_flops * (self.experts is not None)

    def selects(self, plan: ShardPlan) -> bool:
        """Return whether a query of the step sees more keys than it may use."""
        return self.top_k is not None and plan.most_keys > self.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of one rank. The defaults replace rates that could not be measured; they suit ranks on one host."""

    step_s: float = 4e-3
    """Time of a nearly empty step, over all layers."""
    linear_flops_per_s: float = 1e11
    attention_flops_per_s: float = 5e10
    run_s: float = 8e-5
    """Fixed time per attention call. Over pages, a run of step n takes n calls."""
    row_s: float = 5e-7
    """Time to store or read the KV of one token in one layer."""
    merge_row_s: float = 5e-7
    """Time to merge one partial of one token in one layer."""
    exchange_s: float = 3e-4
    """Fixed time per collective."""
    exchange_bytes_per_s: float = 1e9
    """Bytes that one rank receives per second."""
    all_reduce_s: float = 0.0
    """Fixed time to sum hidden states over TP ranks. 0 with one TP rank."""
    all_reduce_row_s: float = 0.0
    """Additional time per token to sum hidden states over TP ranks. 0 with one TP rank."""
    hidden_share: float = 0.0
    """Share of a collective's time that overlaps with computation. 0 if the ranks copy the data themselves."""


def estimate_step_s(plan: ShardPlan, shape: ModelShape, rates: Rates, passing: Passing | None = None) -> float:
    """Return the expected time of a replica's step, from its plan to the last rank's result.

    ``passing`` says whether keys or queries travel if KV is divided among the ranks. None if each rank has all KV.
    """
    exchanged = list(received_bytes(plan, shape, passing))
    works = [_work(plan, runs, shape, rates, passing) for runs in plan.distinct_runs]
    compute_s = max(_rank_s(work, shape, rates) for work in works)
    hideable_s = compute_s / len(exchanged) if exchanged else 0.0
    layer_s = compute_s + sum(_exposed_s(num_bytes, hideable_s, rates) for num_bytes in exchanged)
    experts_s, dispatched_s = _experts_s(plan, shape, rates)
    layer_s += experts_s + dispatched_s
    # Weights have a whole layer to arrive, except while tokens travel.
    weights = [shape.weight_bytes] if shape.weight_bytes else []
    idle_s = max(0.0, layer_s - dispatched_s - sum(_exchange_s(num_bytes, rates) for num_bytes in exchanged))
    layer_s += sum(_exposed_s(num_bytes, idle_s, rates) for num_bytes in weights)
    last_s = layer_s
    if passing is not Passing.PASS_Q:
        last_s = max(_kv_s(work, shape, rates) for work in works)
        last_s += sum(_exposed_s(num_bytes, 0.0, rates) for num_bytes in [*exchanged, *weights])
    join_s = 0.0 if plan.is_replicated else rates.exchange_s
    return rates.step_s + (shape.num_layers - 1) * layer_s + last_s + join_s


def computed_pairs(run: Run) -> int:
    """Return a run's pairs, plus those that kernels compute needlessly in partly visible tiles.

    A run of step n has n triangles, one for each class of keys by position modulo n.
    """
    return run.num_pairs + run.step * (run.count * (min(run.count, TILE) - 1) // 2)


def skipped_pairs(run: Run, window: int) -> int:
    """Return the number of pairs that a window saves: those outside it, except in tiles that are partly inside."""
    return max(0, run.pairs_beyond(window) - run.step * (run.count * (min(run.count, TILE) - 1) // 2))


class _Work(NamedTuple):
    tokens: int
    keys: float
    """Number of keys that the tokens see."""
    pairs: float
    calls: int
    """Number of attention calls, which run one after another."""
    partials: int
    """Number of partials per token, which are merged one after another."""
    rows: float
    """Number of KV rows that are stored, or read in order to be sent."""
    scored_pairs: float = 0
    """Number of pairs that are scored to select keys. 0 if all visible keys are used."""


def _rank_s(work: _Work, shape: ModelShape, rates: Rates) -> float:
    merged = work.tokens * (work.partials - 1)
    return (
        work.tokens * shape.own_flops / rates.linear_flops_per_s
        + _attention_s(work, shape, rates)
        + work.calls * rates.run_s
        + work.rows * rates.row_s
        + merged * rates.merge_row_s
        + ALL_REDUCES * (rates.all_reduce_s + work.tokens * rates.all_reduce_row_s)
    )


def _experts_s(plan: ShardPlan, shape: ModelShape, rates: Rates) -> tuple[float, float]:
    """Return the time of an average layer's experts, and that of the exchange of tokens, which nothing hides.

    All DP ranks are expected to compute the same step.
    """
    experts = shape.experts
    if experts is None:
        return 0.0, 0.0
    lens = plan.lens[:1] if plan.is_replicated and experts.dp == 1 else plan.lens * experts.dp
    compute_s = experts.tokens_per_shard(lens) * shape.expert_flops / rates.linear_flops_per_s
    fixed_s, moved_s = dispatch_s(experts.traffic(lens), rates)
    return compute_s, shape.expert_share * (fixed_s + moved_s)


def dispatch_s(traffic: ExpertTraffic, rates: Rates) -> tuple[float, float]:
    """Return the fixed time of an exchange of tokens, and the time that its bytes take, without those of TP ranks."""
    return traffic.num_collectives * rates.exchange_s, traffic.num_bytes / rates.exchange_bytes_per_s


def _attention_s(work: _Work, shape: ModelShape, rates: Rates) -> float:
    if work.scored_pairs:
        flops = work.pairs * shape.stored_pair_flops + work.scored_pairs * shape.index_flops
        return flops / rates.attention_flops_per_s
    return work.pairs * shape.attention_flops / rates.attention_flops_per_s + _expand_s(work, shape, rates)


def _expand_s(work: _Work, shape: ModelShape, rates: Rates) -> float:
    """Return the time to expand keys, or the additional time to use them as stored.

    Layers choose the form with fewer FLOPs. With keys as stored, each token's own projections take as long as the
    expansion of a key. They are part of the linear work.
    """
    if not shape.expand_flops:
        return 0.0
    expand_flops = (work.keys - work.tokens) * shape.expand_flops
    stored_flops = work.pairs * (shape.stored_pair_flops - shape.attention_flops)
    if stored_flops > expand_flops:
        return expand_flops / rates.linear_flops_per_s
    return max(0.0, stored_flops / rates.attention_flops_per_s)


def _kv_s(work: _Work, shape: ModelShape, rates: Rates) -> float:
    """Return the time of the last layer, in which almost no token has a query."""
    kv_s = work.tokens * shape.kv_flops / rates.linear_flops_per_s
    return kv_s + work.rows * rates.row_s + ALL_REDUCES * rates.all_reduce_s


def _work(plan: ShardPlan, runs: RankRuns, shape: ModelShape, rates: Rates, passing: Passing | None) -> _Work:
    work = _work_of_all_keys(plan, runs, shape, rates, passing)
    return _with_selection(work, plan, runs, shape.top_k, passing) if shape.top_k and shape.selects(plan) else work


def _with_selection(work: _Work, plan: ShardPlan, runs: RankRuns, top_k: int, passing: Passing | None) -> _Work:
    """Return the work of a step that selects keys. With pass-Q, ranks share the keys instead of the queries."""
    share = 1.0
    if passing is Passing.PASS_Q:
        runs = tuple(chain.from_iterable(plan.distinct_runs))
        share = 1 / plan.cp
    scored = sum(run.num_pairs for run in runs)
    selected = scored - sum(run.pairs_beyond(top_k) for run in runs)
    return work._replace(pairs=share * selected, scored_pairs=share * scored)


def _work_of_all_keys(
    plan: ShardPlan, runs: RankRuns, shape: ModelShape, rates: Rates, passing: Passing | None
) -> _Work:
    tokens, all_pairs = sum(run.count for run in runs), sum(computed_pairs(run) for run in runs)
    skipped = sum(num_layers * skipped_pairs(run, window) for window, num_layers in shape.windows for run in runs)
    pairs = all_pairs - skipped / shape.num_layers
    prefix, has_prefix, num_runs = sum(plan.prefix_lens), any(plan.prefix_lens), len(runs)
    keys = plan.num_keys(runs)
    if passing is None:
        if plan.is_replicated or not rates.hidden_share:
            return _Work(tokens, keys, pairs, sum(run.step for run in runs), 1, plan.num_tokens)
        partials = plan.cp + has_prefix
        return _Work(tokens, keys, pairs, num_runs * partials, partials, plan.num_tokens)
    stored = plan.num_tokens / plan.cp
    if passing is Passing.PASS_KV:
        return _Work(tokens, keys, pairs, num_runs * plan.cp, plan.cp, stored + prefix / plan.cp)
    own_prefix_pairs = sum(run.count * plan.prefix_lens[run.request] for run in runs)
    prefix_pairs = sum(new * old for new, old in zip(plan.extend_lens, plan.prefix_lens, strict=True))
    num_new = len(plan.distinct_runs)
    # Every rank computes attention of all ranks' queries over its part of the prefix, one call per request.
    calls = num_runs * num_new + len(plan.extend_lens) * has_prefix
    partials = num_new + plan.cp * has_prefix
    pairs += prefix_pairs / plan.cp - own_prefix_pairs
    return _Work(tokens, sum(plan.extend_lens) + prefix / plan.cp, pairs, calls, partials, stored)


def received_bytes(plan: ShardPlan, shape: ModelShape, passing: Passing | None = None) -> Iterator[float]:
    """Yield the bytes of tokens that one rank receives in each CP collective of a layer."""
    others, prefix = plan.cp - 1, sum(plan.prefix_lens)
    if passing is Passing.PASS_KV:
        rows = prefix / plan.cp + (0 if plan.is_replicated else plan.padded_len)
        yield from [rows * shape.kv_row_bytes] * (others if rows else 0)
        return
    if not plan.is_replicated:
        yield others * plan.padded_len * shape.kv_row_bytes
    selects = shape.index_share * shape.selects(plan)
    if passing is Passing.PASS_Q and (prefix or selects):
        if not plan.is_replicated:
            yield others * plan.padded_len * (shape.q_row_bytes + selects * shape.index_row_bytes)
        if selects and shape.top_k:
            yield others * plan.num_tokens * selects * shape.top_k * CANDIDATE_BYTES
        yield others * plan.padded_len * shape.partial_row_bytes


def _exposed_s(num_bytes: float, hideable_s: float, rates: Rates) -> float:
    """Return the part of a collective's time that does not overlap with ``hideable_s`` seconds of computation."""
    exchange_s = _exchange_s(num_bytes, rates)
    return exchange_s - min(exchange_s * rates.hidden_share, hideable_s)


def _exchange_s(num_bytes: float, rates: Rates) -> float:
    return rates.exchange_s + num_bytes / rates.exchange_bytes_per_s
