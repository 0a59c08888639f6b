"""How `baton plan` expects a GPU's memory to be divided; a worker measures it instead."""

from cluster.planner.model import ModelFacts, longest_context
from cluster.planner.weights import weights_gib
from cluster.spec.config import DecodeConfig, DeployConfig, ParallelConfig, PrefillConfig
from cluster.spec.decode_graphs import batch_sizes, records_decode
from cluster.spec.gpu_memory import GpuMemory
from cluster.spec.kv import DTYPE_BYTES, pages_for
from cluster.spec.pool import GIB
from cluster.spec.ranks import moe_tp_size
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import ON_ONE_RANK, Passing

_PAGE_ID_BYTES = 8
# Allowances, not measurements: what CUDA keeps of a layer in a graph, and cuBLAS for the stream of recording.
_GRAPH_LAYER_BYTES = 256 << 10
_WORKSPACE_BYTES = 32 << 20
_PASSED_QUERY_BYTES = 16
"""Of an element of a query: as it comes, in its order, what was found, and that in fp32, twice."""
_DRAW_BYTES = 24
"""Of a logit in a draw with top-p: 21 as tensors that exist at once, counted on a CPU."""


def expected_memory(config: DeployConfig, pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> GpuMemory:
    """Of the worker with most weights."""
    return GpuMemory(
        total=config.resources.gpu_memory_gib,
        fraction=config.kv.memory_fraction,
        weights=weights_gib(config, pool, model),
        activations=(_activation_bytes(pool, model) + _exchange_bytes(config, pool, model)) / GIB,
        graphs=_graph_bytes(config, pool, model) / GIB,
    )


def _activation_bytes(pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> float:
    """Of the widest layer, for the most tokens of a step on one rank, and of drawing a token of every request."""
    num_tokens, counts = _most_tokens(pool), model.weights
    widths = (counts.heads_width + counts.mlp_width) / pool.parallel.tp + counts.answers_width / pool.parallel.ep
    # Of all shards' tokens each computes as much less of the width as they are more, but holds them, and their sums.
    brought = 2 * counts.hidden * (_num_shards(pool.parallel, model) - 1)
    layer = num_tokens * (4 * counts.hidden + widths + brought) * DTYPE_BYTES[model.dtype]
    return layer + _DRAW_BYTES * pool.max_requests * counts.vocab


def _most_tokens(pool: PrefillConfig | DecodeConfig) -> int:
    """Of one step on one CP rank."""
    has_all = isinstance(pool, DecodeConfig) or pool.strategy.fullest in ON_ONE_RANK
    return pool.chunk_tokens if has_all else -(-pool.chunk_tokens // pool.parallel.cp)


def _exchange_bytes(config: DeployConfig, pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> float:
    """In ring mode, of the longest prompt: two ranks' blocks of keys and values, or the queries of all ranks."""
    if not isinstance(pool, PrefillConfig) or pool.ownership is KvOwnership.REPLICATED:
        return 0.0
    geometry, tp = model.geometry, pool.parallel.tp
    row_bytes = geometry.bytes_per_token / geometry.num_layers / tp
    passed_kv = 2 * longest_context(config, model) / pool.parallel.cp * row_bytes
    passed_q = pool.chunk_tokens * model.num_heads / tp * model.head_dim * _PASSED_QUERY_BYTES
    costs = {Passing.PASS_KV: passed_kv, Passing.PASS_Q: passed_q}
    return max(costs[passing] for passing in pool.passing.candidates)


def _graph_bytes(config: DeployConfig, pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> float:
    """Graphs share what a step of most requests takes; each has its own page tables, and the driver's copy of it."""
    if not records_decode(config, pool):
        return 0.0
    sizes = batch_sizes(pool.max_requests)
    tables = sum(sizes) * pages_for(model.max_context, config.kv.page_size) * _PAGE_ID_BYTES
    counts, shards = model.weights, _num_shards(pool.parallel, model)
    own = 4 * counts.hidden + counts.heads_width / pool.parallel.tp + 2 * counts.hidden * (shards - 1)
    # Rows are kept for all that any shard's tokens ask for, wherever it is computed.
    inner = counts.mlp_width / (moe_tp_size(pool.parallel) if counts.expert_layers else shards * pool.parallel.tp)
    step = pool.max_requests * (own + shards * (inner + counts.answers_width)) * DTYPE_BYTES[model.dtype]
    return tables + step + len(sizes) * model.geometry.num_layers * _GRAPH_LAYER_BYTES + _WORKSPACE_BYTES


def _num_shards(parallel: ParallelConfig, model: ModelFacts) -> int:
    """Attention shards whose tokens meet in one feed-forward block."""
    return parallel.dp * parallel.cp // parallel.moe_dp if model.weights.expert_layers else parallel.dp
