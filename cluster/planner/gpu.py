"""How `baton plan` expects a GPU's memory to be divided; a worker measures it instead."""

from cluster.planner.model import ModelFacts
from cluster.spec.config import DecodeConfig, DeployConfig, PoolConfig, PrefillConfig
from cluster.spec.gpu_memory import GpuMemory
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.pool import GIB
from cluster.spec.ranks import stage_layers


def expected_memory(config: DeployConfig, pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> GpuMemory:
    """Of the worker with most layers, with all of the embedding."""
    itemsize = DTYPE_BYTES[model.geometry.dtype]
    return GpuMemory(
        total=config.resources.gpu_memory_gib,
        fraction=config.kv.memory_fraction,
        weights=weights_gib(pool, model),
        activations=_num_activations(pool, model) * itemsize / GIB,
    )


def weights_gib(pool: PoolConfig, model: ModelFacts) -> float:
    """Of the worker with most layers."""
    return _num_weights(pool, model) * DTYPE_BYTES[model.geometry.dtype] / GIB


def _num_weights(pool: PoolConfig, model: ModelFacts) -> float:
    """Tables and layers are divided over tp; experts over all ranks of a stage, but for their copies."""
    parallel, counts = pool.parallel, model.weights
    num_layers = len(stage_layers(model.geometry.num_layers, parallel.pp, 0))
    in_stage = parallel.dp * parallel.cp * parallel.tp
    experts = counts.experts_a_layer * parallel.moe_dp / in_stage
    return counts.tables / parallel.tp + num_layers * (counts.a_layer / parallel.tp + experts)


def _num_activations(pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> float:
    """Of the widest layer, for a whole step's tokens on one rank, and fp32 logits of all requests."""
    num_tokens = -(-pool.chunk_tokens // pool.parallel.cp)
    counts = model.weights
    return num_tokens * (4 * counts.hidden + counts.width / pool.parallel.tp) + 4 * pool.max_requests * counts.vocab
