"""Estimates of a worker's GPU and host memory."""

from cluster.planner.fp8_memory import saved_bytes
from cluster.planner.model import ModelFacts
from cluster.spec.config import (
    AnyParallel,
    DecodeConfig,
    DeployConfig,
    Device,
    Pool,
    PrefillConfig,
    TransferBackendName,
)
from cluster.spec.decode_graphs import batch_sizes, captures_decode
from cluster.spec.hicache_config import STORE_CLIENT_BYTES, StorageBackendName
from cluster.spec.ids import Role
from cluster.spec.kv import DTYPE_BYTES, pages_for
from cluster.spec.linear_shards import LinearShards
from cluster.spec.memory import GIB, LIBRARIES_GIB, GpuMemory, HostMemory
from cluster.spec.ranks import head_copies, moe_tp_size, sizes_of, stage_layers, world_size
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import Passing
from workers.attention.limits import MOST_CAPTURED_SCORES
from workers.context_parallel.shard_plan import dummy_request, make_step_shape
from workers.models.interface import DecoderConfig

_PAGE_ID_BYTES = 8
_NUMBER_BYTES = 4
"""Bytes of a selected key's number."""
_SCORE_BYTES = 6
"""Bytes per score of a key in a captured step, with the best scores of each part and their numbers."""
_PASSED_QUERIES = 4
"""Memory of a step in which queries circulate, as a multiple of one fp32 partial result."""
_DRAW_BYTES = 24
"""Bytes per logit when sampling with top-p. On a CPU, at most 21 of them are in use at once."""
# Allowances, not measurements: CUDA's memory per layer of a graph, and cuBLAS's workspace for the capture stream.
_GRAPH_LAYER_BYTES = 256 << 10
_WORKSPACE_BYTES = 32 << 20


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
    for layer in layers:
        cost = model.config.layer_costs[layer]
        attention = (cost.queries + cost.kv * copies) / tp + cost.whole
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
    is_rearranged = config.resources.device is Device.CPU and model.dtype == "bfloat16"
    return 1 if is_one and not is_rearranged else is_first + is_last


def expected_memory(config: DeployConfig, pool: Pool, model: ModelFacts) -> GpuMemory:
    share = config.resources.gpus_per_worker
    return GpuMemory(
        total=config.resources.gpu_memory_gib * share,
        fraction=config.kv.memory_fraction,
        weights=weights_gib(config, pool, model),
        activations=(_activation_bytes(pool, model) + _exchange_bytes(config, pool, model)) / GIB,
        graphs=_graph_bytes(config, pool, model) / GIB,
        others=LIBRARIES_GIB if share < 1 else 0.0,
    )


def _activation_bytes(pool: Pool, model: ModelFacts) -> float:
    """Return the bytes of the widest layer's activations, expanded keys and selected rows in the largest step, plus
    those of sampling all requests.
    """
    num_tokens, config, hidden = _most_tokens(pool), model.config, model.config.hidden_size
    width = max(cost.attention_width + cost.dense_width + cost.routed_width for cost in config.layer_costs)
    widths = width / pool.parallel.tp + _answers_width(config) / pool.parallel.ep
    # A rank that gathers other shards' tokens computes less of the width, but holds all tokens and their sums.
    gathered = 2 * hidden * (_num_shards(pool.parallel, config) - 1)
    expanded = max(cost.expanded_size for cost in config.layer_costs) / pool.parallel.tp
    whole = max(cost.whole_width for cost in config.layer_costs)
    layer = (num_tokens * (4 * hidden + widths + whole + gathered) + expanded) * DTYPE_BYTES[model.dtype]
    layer += max(cost.selection_bytes for cost in config.layer_costs)
    return layer + _DRAW_BYTES * pool.max_requests * config.vocab_size


def _most_tokens(pool: Pool) -> int:
    """Return the number of tokens in the largest step on one CP rank."""
    if isinstance(pool, DecodeConfig):
        return pool.chunk_tokens
    return max(
        make_step_shape([dummy_request(pool.chunk_tokens)], pool.strategy.fullest, cp=pool.parallel.cp).shard_lens
    )


def _exchange_bytes(config: DeployConfig, pool: Pool, model: ModelFacts) -> float:
    """Return the bytes of ring mode's buffers for the longest prompt: two ranks' keys and values, or all queries.

    To select keys, a rank also holds all keys of a layer, or the indexer's queries and selections of all ranks.
    """
    if not isinstance(pool, PrefillConfig) or pool.ownership is KvOwnership.REPLICATED:
        return 0.0
    geometry, tp = model.geometry, pool.parallel.tp
    copies = head_copies((group.num_heads for group in geometry.groups), tp)
    row_bytes = max(group.num_heads * group.slot_bytes for group in geometry.groups) * copies / tp
    longest, cost = config.model.longest_context(model.config.max_position_embeddings), model.config.cost(model.dtype)
    passed_kv = (2 / pool.parallel.cp + model.config.selects_keys) * longest * row_bytes
    passed_q = pool.chunk_tokens * cost.partial_row_bytes / tp * _PASSED_QUERIES
    passed_q += pool.chunk_tokens * (cost.index_row_bytes + _NUMBER_BYTES * (cost.top_k or 0))
    costs = {Passing.PASS_KV: passed_kv, Passing.PASS_Q: passed_q}
    return max(costs[passing] for passing in pool.passing.candidates)


def _graph_bytes(config: DeployConfig, pool: Pool, model: ModelFacts) -> float:
    """Return the bytes of CUDA graphs: the largest step, which all graphs share, and their page tables and nodes."""
    if not captures_decode(config, pool, has_windows=model.geometry.has_windows):
        return 0.0
    sizes, most_keys = batch_sizes(pool.max_requests), model.config.max_position_embeddings
    tables = sum(sizes) * pages_for(most_keys, config.kv.page_size) * _PAGE_ID_BYTES
    num_scores = min(pool.max_requests * most_keys, max(MOST_CAPTURED_SCORES, most_keys))
    parallel, hidden, shards = pool.parallel, model.config.hidden_size, _num_shards(pool.parallel, model.config)
    attention = max(cost.attention_width for cost in model.config.layer_costs)
    own = 4 * hidden + attention / parallel.tp + 2 * hidden * (shards - 1)
    # Each token of each shard takes a row for each chosen expert, even if another rank holds that expert.
    inner = max(
        cost.dense_width / (parallel.dp * parallel.tp) + cost.routed_width / moe_tp_size(parallel)
        for cost in model.config.layer_costs
    )
    widths = own + shards * (inner + _answers_width(model.config))
    step = pool.max_requests * widths * DTYPE_BYTES[model.dtype]
    step += _SCORE_BYTES * num_scores * model.config.selects_keys
    return tables + step + len(sizes) * model.geometry.num_layers * _GRAPH_LAYER_BYTES + _WORKSPACE_BYTES


def _answers_width(config: DecoderConfig) -> int:
    """Return the total output width of the experts that a token chooses."""
    return config.experts_per_token * config.hidden_size


def _num_shards(parallel: AnyParallel, config: DecoderConfig) -> int:
    """Return the number of attention shards whose tokens are gathered for one feed-forward block."""
    return parallel.dp * parallel.cp // parallel.moe_dp if config.experts_per_token else parallel.dp


def expected_host_memory(config: DeployConfig, pool: Pool, model: ModelFacts, pool_gib: float) -> HostMemory:
    """Return the host memory of the worker with the most weights, given its pool size."""
    is_store = config.hicache.storage.backend is StorageBackendName.MOONCAKE_STORE
    return HostMemory(
        weights=weights_gib(config, pool, model) if config.resources.device is Device.CPU else 0.0,
        pages=pool_gib,
        cached=config.hicache.host_gib if config.kv.prefix_cache else 0.0,
        in_transit=STORE_CLIENT_BYTES / GIB if is_store else 0.0,
    )


def host_memory_lack(config: DeployConfig, expected: dict[Role, tuple[Pool, HostMemory]], given_gib: float) -> str:
    """Describe how much memory a machine needs; empty if it has enough.

    With shared memory, one machine must hold all workers; otherwise, it must hold at least one worker of either role.
    """
    one_machine = config.transfer.backend is TransferBackendName.SHARED_MEMORY
    counts = {
        name: pool.replicas * world_size(sizes_of(pool.parallel)) if one_machine else 1
        for name, (pool, _) in expected.items()
    }
    needs = [counts[name] * memory.total for name, (_, memory) in expected.items()]
    wanted = sum(needs) if one_machine else max(needs)
    if wanted <= given_gib:
        return ""
    each = "; ".join(
        f"{counts[name]} {name} worker{'s' * (counts[name] > 1)} of {memory}" for name, (_, memory) in expected.items()
    )
    where = "for" if one_machine else "for whichever needs more:"
    return f"at least {wanted:.4g}, {where} {each}"
