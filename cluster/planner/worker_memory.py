"""Estimates of a worker's GPU and host memory. `cluster.planner.step_memory` estimates that of its steps."""

from cluster.planner.fp8_memory import saved_bytes
from cluster.planner.model import ModelFacts
from cluster.planner.step_memory import graph_bytes, step_gib
from cluster.spec.config import DeployConfig, Device, Pool
from cluster.spec.hicache_config import STORE_CLIENT_BYTES, StorageBackendName
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.linear_shards import LinearShards
from cluster.spec.memory import GIB, LIBRARIES_GIB, GpuMemory, HostMemory
from cluster.spec.ranks import head_copies, stage_layers


def weights_gib(config: DeployConfig, pool: Pool, model: ModelFacts) -> float:
    return max(_weight_bytes(config, pool, model, stage) for stage in range(pool.parallel.pp)) / GIB


def _weight_bytes(config: DeployConfig, pool: Pool, model: ModelFacts, stage: int) -> float:
    num_bytes = _num_weights(config, pool, model, stage) * DTYPE_BYTES[model.dtype]
    if config.resources.device is Device.CPU:
        return num_bytes
    return num_bytes - saved_bytes(pool, model, stage_layers(model.config.num_layers, pool.parallel.pp, stage))


def _num_weights(config: DeployConfig, pool: Pool, model: ModelFacts, stage: int) -> float:
    """Count one rank's weights: embeddings and attention are divided by tp, MLPs by dp*tp, and each copy of the
    experts by its number of ranks."""
    dp, cp, tp, moe_dp = pool.parallel.dp, pool.parallel.cp, pool.parallel.tp, pool.parallel.moe_dp
    num_tables = _num_tables(config, model, is_first=stage == 0, is_last=stage == pool.parallel.pp - 1)
    numbers = num_tables * model.config.vocab_size * model.config.hidden_size / tp
    copies = head_copies((group.num_heads for group in model.geometry.groups), tp)
    layers = stage_layers(model.config.num_layers, pool.parallel.pp, stage)
    # The matrices that expand latents, at 2 FLOPs per element, are also kept rearranged.
    expand_flops = model.config.attention.cost(model.config.hidden_size).expand_flops
    rearranged = expand_flops / 2 if _is_rearranged(config, model) else 0
    for layer in layers:
        cost = model.config.layer_costs[layer]
        attention = (cost.queries + rearranged + cost.kv * copies) / tp + cost.whole
        numbers += attention + cost.dense / (dp * tp) + cost.experts * moe_dp / (dp * cp * tp)
    shared = num_projections(pool.linear_shards, pool, model, len(layers))
    return numbers + shared - num_projections(None, pool, model, len(layers))


def num_projections(shards: LinearShards | None, pool: Pool, model: ModelFacts, num_layers: int) -> int:
    """Count one rank's weights in the query and output projections of a stage, and in the buffers for them.

    With ``shards``, CP ranks hold the projections together, and the rank with the most counts.
    """
    shapes = model.config.attention.of_rank(pool.parallel.tp).projections(model.config.hidden_size)
    if shards is None:
        return num_layers * sum(shape.size for shape in shapes)
    return sum(shards.held_rows(shape.outputs, num_layers) * shape.inputs for shape in shapes)


def _num_tables(config: DeployConfig, model: ModelFacts, *, is_first: bool, is_last: bool) -> int:
    """Count embedding tables: tied ones in one stage count once, unless a CPU rearranges a bf16 copy for the output."""
    is_one = is_first and is_last and model.config.tie_word_embeddings
    return 1 if is_one and not _is_rearranged(config, model) else is_first + is_last


def _is_rearranged(config: DeployConfig, model: ModelFacts) -> bool:
    """Return whether the workers' CPUs rearrange matrices for products if they have instructions for bf16."""
    return config.resources.device is Device.CPU and model.dtype == "bfloat16"


def expected_memory(config: DeployConfig, pool: Pool, model: ModelFacts) -> GpuMemory:
    share = config.resources.gpus_per_worker
    return GpuMemory(
        total=config.resources.gpu_memory_gib * share,
        fraction=config.kv.memory_fraction,
        weights=weights_gib(config, pool, model),
        activations=step_gib(config, pool, model),
        graphs=graph_bytes(config, pool, model) / GIB,
        others=LIBRARIES_GIB if share < 1 else 0.0,
    )


def expected_host_memory(config: DeployConfig, pool: Pool, model: ModelFacts, pool_gib: float) -> HostMemory:
    """Return the host memory of the worker with the most weights, given its pool size."""
    is_store = config.hicache.storage.backend is StorageBackendName.MOONCAKE_STORE
    is_cpu = config.resources.device is Device.CPU
    return HostMemory(
        weights=weights_gib(config, pool, model) if is_cpu else 0.0,
        activations=step_gib(config, pool, model) if is_cpu else 0.0,
        pages=pool_gib,
        cached=config.hicache.host_gib if config.kv.prefix_cache else 0.0,
        in_transit=STORE_CLIENT_BYTES / GIB if is_store else 0.0,
    )
