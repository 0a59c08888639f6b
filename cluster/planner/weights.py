"""Memory that `baton plan` expects the weights of a worker to take."""

from cluster.planner.model import ModelFacts
from cluster.spec.config import DeployConfig, Device, PoolConfig
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.pool import GIB
from cluster.spec.ranks import head_copies, stage_layers


def weights_gib(config: DeployConfig, pool: PoolConfig, model: ModelFacts) -> float:
    """Return the weights of the worker that holds most of them."""
    numbers = max(_num_weights(config, pool, model, stage) for stage in range(pool.parallel.pp))
    return numbers * DTYPE_BYTES[model.dtype] / GIB


def _num_weights(config: DeployConfig, pool: PoolConfig, model: ModelFacts, stage: int) -> float:
    """Divide tables and attention over tp, an MLP over dp and tp, experts over all ranks that share a copy."""
    dp, cp, tp, moe_dp = pool.parallel.dp, pool.parallel.cp, pool.parallel.tp, pool.parallel.moe_dp
    num_tables = _num_tables(config, model, is_first=stage == 0, is_last=stage == pool.parallel.pp - 1)
    numbers = num_tables * model.config.vocab_size * model.config.hidden_size / tp
    copies = head_copies([model.config.num_kv_heads], tp)
    for layer in stage_layers(model.config.num_layers, pool.parallel.pp, stage):
        weights = model.config.layer_weights(layer)
        attention = (weights.queries + weights.kv * copies) / tp
        numbers += attention + weights.dense / (dp * tp) + weights.experts * moe_dp / (dp * cp * tp)
    return numbers


def _num_tables(config: DeployConfig, model: ModelFacts, *, is_first: bool, is_last: bool) -> int:
    """Count token tables: one where input and output share it, unless a CPU rearranges bf16 for the output."""
    is_one = is_first and is_last and model.config.tie_word_embeddings
    is_rearranged = config.resources.device is Device.CPU and model.dtype == "bfloat16"
    return 1 if is_one and not is_rearranged else is_first + is_last
