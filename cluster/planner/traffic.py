"""Bytes that the workers of a prefill replica receive from each other in one layer."""

from dataclasses import dataclass

from cluster.planner.model import ModelFacts, prefill_shape
from cluster.spec.config import DeployConfig
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import MoeDispatch, Strategy, StrategySetting
from workers.context_parallel.cost_model import ModelShape, received_bytes
from workers.context_parallel.shard_plan import ShardPlan, dummy_request, join_shapes, plan_shards, shape_of_plan
from workers.expert_parallel.dispatch_cost import gathered_rows


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
    shape = prefill_shape(config, model, range(decoder.num_layers))
    sums = decoder.sum_bytes(model.dtype, in_background=config.collectives_in_background)
    row_bytes = decoder.hidden_size * DTYPE_BYTES[model.dtype]
    tp_rows, mlp_rows = (gathered_rows(each, parallel.tp, [max(lens)] * each) for each in (1, parallel.dp))
    mlp_bytes = (mlp_rows.routed + mlp_rows.returned) * row_bytes + mlp_rows.tp_reduced * sums
    experts = shape.experts.traffic(lens) if shape.experts else None
    return TrafficPlan(
        num_tokens=config.prefill.chunk_tokens,
        strategy=strategy,
        context_bytes=round(_context_bytes(config, shards, shape)),
        attention_bytes=round(tp_rows.tp_reduced * sums),
        mlp_bytes=round(mlp_bytes * sum(cost.dense > 0 for cost in decoder.layer_costs) / decoder.num_layers),
        expert_bytes=round((experts.num_bytes + experts.tp_bytes) * shape.expert_share) if experts else 0,
        dispatch=experts.dispatch if experts else None,
        projection_bytes=shape.weight_bytes,
    )


def _strategy(setting: StrategySetting) -> Strategy:
    candidates = setting.candidates
    return Strategy.ZIGZAG if Strategy.ZIGZAG in candidates else candidates[0]


def _context_bytes(config: DeployConfig, shards: ShardPlan, shape: ModelShape) -> float:
    """Return the bytes that CP ranks exchange, in ring mode those of the cheaper passing."""
    prefill = config.prefill
    passings = prefill.passing.candidates if prefill.ownership is KvOwnership.SHARDED else (None,)
    return min(sum(received_bytes(shards, shape, passing)) for passing in passings)
