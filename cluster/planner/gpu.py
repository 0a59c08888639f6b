"""How `baton plan` expects a GPU's memory to be divided; a worker measures it instead."""

from cluster.planner.model import ModelFacts
from cluster.planner.weights import weights_gib
from cluster.spec.config import DecodeConfig, DeployConfig, PrefillConfig
from cluster.spec.gpu_memory import GpuMemory
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.pool import GIB


def expected_memory(config: DeployConfig, pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> GpuMemory:
    """Of the worker with most weights."""
    itemsize = DTYPE_BYTES[model.geometry.dtype]
    return GpuMemory(
        total=config.resources.gpu_memory_gib,
        fraction=config.kv.memory_fraction,
        weights=weights_gib(config, pool, model),
        activations=_num_activations(pool, model) * itemsize / GIB,
    )


def _num_activations(pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> float:
    """Of the widest layer, for a whole step's tokens on one rank, and fp32 logits of all requests."""
    num_tokens = -(-pool.chunk_tokens // pool.parallel.cp)
    counts = model.weights
    return num_tokens * (4 * counts.hidden + counts.width / pool.parallel.tp) + 4 * pool.max_requests * counts.vocab
