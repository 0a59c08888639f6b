"""How much memory `baton plan` expects the weights of a worker to take."""

from cluster.planner.model import ModelFacts
from cluster.spec.config import DeployConfig, Device, PoolConfig
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.pool import GIB
from cluster.spec.ranks import stage_layers


def weights_gib(config: DeployConfig, pool: PoolConfig, model: ModelFacts) -> float:
    """Of the worker that keeps most of them."""
    numbers = max(_num_weights(config, pool, model, stage) for stage in range(pool.parallel.pp))
    return numbers * DTYPE_BYTES[model.geometry.dtype] / GIB


def _num_weights(config: DeployConfig, pool: PoolConfig, model: ModelFacts, stage: int) -> float:
    """Tables and layers are divided over tp; experts over all ranks of a stage, but for their copies."""
    parallel, counts = pool.parallel, model.weights
    num_layers = len(stage_layers(model.geometry.num_layers, parallel.pp, stage))
    in_stage = parallel.dp * parallel.cp * parallel.tp
    experts = counts.experts_a_layer * parallel.moe_dp / in_stage
    tables = counts.a_table * _num_tables(config, model, is_first=stage == 0, is_last=stage == parallel.pp - 1)
    return tables / parallel.tp + num_layers * (counts.a_layer / parallel.tp + experts)


def _num_tables(config: DeployConfig, model: ModelFacts, *, is_first: bool, is_last: bool) -> int:
    """The embedding and the way back, one where they are the same, unless a CPU rearranges bf16 for the way back."""
    is_one = is_first and is_last and model.weights.is_tied
    is_rearranged = config.resources.device is Device.CPU and model.geometry.dtype == "bfloat16"
    return 1 if is_one and not is_rearranged else is_first + is_last
