"""Bytes that the workers of a prefill replica receive from each other in one layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.planner.model import ModelFacts
from cluster.spec.config import DeployConfig, Device
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.ranks import moe_tp_size
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import MoeDispatch, Strategy, StrategySetting
from workers.context_parallel.cost_model import ModelShape, received_bytes
from workers.context_parallel.shard_plan import ShardPlan, dummy_request, join_shapes, plan_shards, shape_of_plan
from workers.expert_parallel.dispatch_cost import (
    CHOICE_BYTES,
    BlockShape,
    ReceivedRows,
    choose_dispatch,
    gathered_rows,
    sent_rows,
)
from workers.layers.config import MoeConfig

_SUM_BYTES = 4
"""Bytes per element of an all-reduce, unless ranks share memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPlan:
    """Bytes that the busiest prefill worker receives in an average layer, in a step with a new prompt's tokens."""

    num_tokens: int
    strategy: Strategy
    context_bytes: int
    """Exchange between CP ranks: keys and values, or latents and index keys, and in ring mode possibly queries."""
    attention_bytes: int
    """All-reduce of attention's output over TP ranks."""
    mlp_bytes: int
    """Tokens and sums of the MLP, or of the shared expert."""
    expert_bytes: int
    """Tokens and sums of all other experts. With all-to-all, the expected number for random routing."""
    dispatch: MoeDispatch | None
    """Exchange of tokens between expert ranks; None without experts."""
    projection_bytes: int
    """Query and output projections of other CP ranks."""

    @property
    def total_bytes(self) -> int:
        parts = self.context_bytes, self.attention_bytes, self.mlp_bytes, self.expert_bytes, self.projection_bytes
        return sum(parts)


def traffic_plan(config: DeployConfig, model: ModelFacts) -> TrafficPlan:
    """Return the traffic of a step with ``prefill.chunk_tokens`` new tokens of one prompt, on every DP rank.

    With strategy ``auto``, the tokens are divided by zigzag.
    """
    parallel, decoder, strategy = config.prefill.parallel, model.config, _strategy(config.prefill.strategy)
    scheduled = [dummy_request(config.prefill.chunk_tokens)]
    shards = plan_shards(scheduled, strategy, parallel.cp)
    lens = join_shapes([shape_of_plan(shards, scheduled, None)] * parallel.dp, parallel.cp)[0].shard_lens
    shape = decoder.of_rank(parallel.tp, range(decoder.num_layers)).cost(model.dtype, config.prefill.linear_shards)
    hidden_bytes = decoder.hidden_size * DTYPE_BYTES[model.dtype]
    sum_bytes = decoder.hidden_size * _SUM_BYTES if config.collectives_in_background else hidden_bytes

    def num_bytes(rows: ReceivedRows, num_choices: int = 0) -> float:
        routed = rows.routed * (hidden_bytes + num_choices * CHOICE_BYTES)
        return routed + rows.returned * hidden_bytes + rows.reduced * sum_bytes

    longest, costs = max(lens), decoder.layer_costs
    dispatch, experts = _expert_rows(config, decoder.moe, lens)
    mlp_bytes = num_bytes(gathered_rows(parallel.dp, parallel.tp, [longest] * parallel.dp))
    expert_bytes = num_bytes(experts, decoder.experts_per_token)
    return TrafficPlan(
        num_tokens=config.prefill.chunk_tokens,
        strategy=strategy,
        context_bytes=round(_context_bytes(config, shards, shape)),
        attention_bytes=round(num_bytes(gathered_rows(1, parallel.tp, [longest]))),
        mlp_bytes=round(mlp_bytes * sum(cost.dense > 0 for cost in costs) / len(costs)),
        expert_bytes=round(expert_bytes * sum(cost.experts > 0 for cost in costs) / len(costs)),
        dispatch=dispatch,
        projection_bytes=shape.weight_bytes,
    )


def _strategy(setting: StrategySetting) -> Strategy:
    candidates = setting.candidates
    return Strategy.ZIGZAG if Strategy.ZIGZAG in candidates else candidates[0]


def _context_bytes(config: DeployConfig, shards: ShardPlan, shape: ModelShape) -> float:
    """Return the bytes that CP ranks exchange, in ring mode those of the cheaper passing."""
    prefill, shape = config.prefill, replace(shape, weight_bytes=0)
    passings = prefill.passing.candidates if prefill.ownership is KvOwnership.SHARDED else (None,)
    return min(sum(received_bytes(shards, shape, passing)) for passing in passings)


def _expert_rows(
    config: DeployConfig, moe: MoeConfig | None, lens: Sequence[int]
) -> tuple[MoeDispatch | None, ReceivedRows]:
    """Return the dispatch of tokens to experts, and the rows received. ``lens`` are those of a step's shape."""
    if moe is None:
        return None, ReceivedRows(0.0, 0.0, 0.0)
    parallel, dispatch = config.prefill.parallel, config.resources.moe_dispatch
    num_shards, moe_tp = parallel.dp * parallel.cp // parallel.moe_dp, moe_tp_size(parallel)
    block = BlockShape(
        shards=num_shards,
        tp=parallel.tp,
        ep=parallel.ep,
        moe_tp=moe_tp,
        top_k=moe.top_k,
        reach=moe.router.reach,
    )
    own = lens[:num_shards] if len(lens) > 1 else None
    num_tokens = lens[0] if own is None else sum(own)
    if dispatch is MoeDispatch.AUTO:
        waits = config.resources.device is Device.CUDA
        dispatch = choose_dispatch(block, own, num_tokens, waits_for_counts=waits)
    is_gather = dispatch is MoeDispatch.GATHER
    rows = gathered_rows(num_shards, parallel.tp, own) if is_gather else sent_rows(block, own)
    return dispatch, rows if own is not None else ReceivedRows(*(num_tokens * count for count in rows))
