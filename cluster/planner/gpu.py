"""Division of a GPU's memory as `baton plan` expects it; a worker measures it instead."""

from cluster.planner.model import ModelFacts
from cluster.planner.weights import weights_gib
from cluster.spec.config import DecodeConfig, DeployConfig, ParallelConfig, PrefillConfig
from cluster.spec.decode_graphs import batch_sizes, captures_decode
from cluster.spec.gpu_memory import GpuMemory
from cluster.spec.kv import DTYPE_BYTES, pages_for
from cluster.spec.pool import GIB
from cluster.spec.ranks import moe_tp_size
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import Passing
from workers.context_parallel.shard_plan import dummy_request, make_step_shape
from workers.models.interface import DecoderConfig, LayerWeights

_PAGE_ID_BYTES = 8
# Allowances, not measurements: what CUDA keeps per layer of a graph, and cuBLAS for the capture stream.
_GRAPH_LAYER_BYTES = 256 << 10
_WORKSPACE_BYTES = 32 << 20
_PASSED_QUERY_BYTES = 16
"""Bytes for an element of a query: as it arrives, in order, its output, and that in fp32, twice."""
_DRAW_BYTES = 24
"""Bytes for a logit sampled with top-p: 21 as tensors that exist at once, counted on a CPU."""


def expected_memory(config: DeployConfig, pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> GpuMemory:
    """Memory of the worker with most weights."""
    return GpuMemory(
        total=config.resources.gpu_memory_gib,
        fraction=config.kv.memory_fraction,
        weights=weights_gib(config, pool, model),
        activations=(_activation_bytes(pool, model) + _exchange_bytes(config, pool, model)) / GIB,
        graphs=_graph_bytes(config, pool, model) / GIB,
    )


def _activation_bytes(pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> float:
    """Widest layer, for the most tokens of a step on one rank, and sampling of a token for every request."""
    num_tokens, config, hidden = _most_tokens(pool), model.config, model.config.hidden_size
    # Every matrix that multiplies a hidden state is as wide as its number of weights per hidden element.
    width = max(weights.used for weights in _layers(config)) / hidden
    widths = width / pool.parallel.tp + _answers_width(config) / pool.parallel.ep
    # The more shards' tokens a rank gathers, the less of the width it computes; but it holds all of them, and their
    # sums.
    gathered = 2 * hidden * (_num_shards(pool.parallel, config) - 1)
    layer = num_tokens * (4 * hidden + widths + gathered) * DTYPE_BYTES[model.dtype]
    return layer + _DRAW_BYTES * pool.max_requests * config.vocab_size


def _most_tokens(pool: PrefillConfig | DecodeConfig) -> int:
    """Return the tokens of the largest step on one CP rank."""
    if isinstance(pool, DecodeConfig):
        return pool.chunk_tokens
    return max(
        make_step_shape([dummy_request(pool.chunk_tokens)], pool.strategy.fullest, cp=pool.parallel.cp).shard_lens
    )


def _exchange_bytes(config: DeployConfig, pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> float:
    """Ring mode, longest prompt: two ranks' blocks of keys and values, or the queries of all ranks."""
    if not isinstance(pool, PrefillConfig) or pool.ownership is KvOwnership.REPLICATED:
        return 0.0
    geometry, tp = model.geometry, pool.parallel.tp
    row_bytes = geometry.bytes_per_token / geometry.num_layers / tp
    passed_kv = 2 * config.model.longest_context(model.config.max_position_embeddings) / pool.parallel.cp * row_bytes
    passed_q = pool.chunk_tokens * model.config.attention.q_size / tp * _PASSED_QUERY_BYTES
    costs = {Passing.PASS_KV: passed_kv, Passing.PASS_Q: passed_q}
    return max(costs[passing] for passing in pool.passing.candidates)


def _graph_bytes(config: DeployConfig, pool: PrefillConfig | DecodeConfig, model: ModelFacts) -> float:
    """Return the memory of the largest step, which all graphs share; each has its own page tables, and the driver's
    copy of it.
    """
    if not captures_decode(config, pool):
        return 0.0
    sizes = batch_sizes(pool.max_requests)
    tables = sum(sizes) * pages_for(model.config.max_position_embeddings, config.kv.page_size) * _PAGE_ID_BYTES
    parallel, hidden, shards = pool.parallel, model.config.hidden_size, _num_shards(pool.parallel, model.config)
    attention = max(weights.queries + weights.kv for weights in _layers(model.config)) / hidden
    own = 4 * hidden + attention / parallel.tp + 2 * hidden * (shards - 1)
    # All choices of any shard's tokens get rows, whichever rank has their experts.
    inner = max(
        weights.dense / (parallel.dp * parallel.tp) + weights.routed / moe_tp_size(parallel)
        for weights in _layers(model.config)
    )
    widths = own + shards * (inner / hidden + _answers_width(model.config))
    step = pool.max_requests * widths * DTYPE_BYTES[model.dtype]
    return tables + step + len(sizes) * model.geometry.num_layers * _GRAPH_LAYER_BYTES + _WORKSPACE_BYTES


def _layers(config: DecoderConfig) -> list[LayerWeights]:
    return [config.layer_weights(layer) for layer in range(config.num_layers)]


def _answers_width(config: DecoderConfig) -> int:
    """Return the summed output width of a token's experts."""
    return config.moe.top_k * config.hidden_size if config.moe else 0


def _num_shards(parallel: ParallelConfig, config: DecoderConfig) -> int:
    """Return the number of attention shards whose tokens are gathered for one feed-forward block."""
    return parallel.dp * parallel.cp // parallel.moe_dp if config.moe else parallel.dp
