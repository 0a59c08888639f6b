"""How much memory `baton plan` expects the weights of a worker to take."""

from cluster.planner.model import ModelFacts, WeightCounts
from cluster.spec.config import DeployConfig, Device, ParallelConfig, PoolConfig
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.pool import GIB
from cluster.spec.ranks import head_copies, stage_layers


def weights_gib(config: DeployConfig, pool: PoolConfig, model: ModelFacts) -> float:
    """Of the worker that keeps most of them."""
    numbers = max(_num_weights(config, pool, model, stage) for stage in range(pool.parallel.pp))
    return numbers * DTYPE_BYTES[model.dtype] / GIB


def _num_weights(config: DeployConfig, pool: PoolConfig, model: ModelFacts, stage: int) -> float:
    """Tables and attention are divided over tp, keys and values no further than heads go."""
    parallel, counts, geometry = pool.parallel, model.weights, model.geometry
    layers = stage_layers(geometry.num_layers, parallel.pp, stage)
    tables = counts.a_table * _num_tables(config, model, is_first=stage == 0, is_last=stage == parallel.pp - 1)
    attention = counts.queries_a_layer + counts.kv_a_layer * head_copies([model.num_kv_heads], parallel.tp)
    feed_forward = sum(_num_feed_forward(parallel, counts, layer) for layer in layers)
    return (tables + len(layers) * attention) / parallel.tp + feed_forward


def _num_feed_forward(parallel: ParallelConfig, counts: WeightCounts, layer: int) -> float:
    """An MLP is divided over dp and tp; experts over all ranks of a stage, but for their copies."""
    if layer in counts.expert_layers:
        return counts.experts_a_layer * parallel.moe_dp / (parallel.dp * parallel.cp * parallel.tp)
    return counts.mlp_a_layer / (parallel.dp * parallel.tp)


def _num_tables(config: DeployConfig, model: ModelFacts, *, is_first: bool, is_last: bool) -> int:
    """The embedding and the way back, one where they are the same, unless a CPU rearranges bf16 for the way back."""
    is_one = is_first and is_last and model.weights.is_tied
    is_rearranged = config.resources.device is Device.CPU and model.dtype == "bfloat16"
    return 1 if is_one and not is_rearranged else is_first + is_last
