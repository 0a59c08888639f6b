"""Estimates of the memory of a worker's largest step: activations, exchanges between ranks, and CUDA graphs."""

from functools import partial

from cluster.planner.exchange_memory import KEY_NUMBER_BYTES, CpExchange, cp_exchanges, staging_bytes
from cluster.planner.model import ModelFacts
from cluster.spec.config import AnyParallel, DecodeConfig, DeployConfig, Device, Pool
from cluster.spec.decode_graphs import batch_sizes, captures_decode
from cluster.spec.kv import DTYPE_BYTES, pages_for
from cluster.spec.memory import GIB
from cluster.spec.ranks import moe_tp_size
from workers.attention.limits import MOST_CAPTURED_SCORES
from workers.context_parallel.shard_plan import dummy_request, make_step_shape
from workers.layers.config import Activations
from workers.models.interface import DecoderConfig, LayerCost

_PAGE_ID_BYTES = 8
_SCORE_BYTES = 6
"""Bytes per score of a key in a captured step, with the best scores of each part and their numbers."""
_WIDE_BYTES = 4
_DRAW_BYTES = 24
"""Bytes per logit when sampling with top-p. On a CPU, at most 21 of them are in use at once."""
# Allowances, not measurements: CUDA's memory per layer of a graph, and cuBLAS's workspace for the capture stream.
_GRAPH_LAYER_BYTES = 256 << 10
_WORKSPACE_BYTES = 32 << 20


def step_gib(config: DeployConfig, pool: Pool, model: ModelFacts) -> float:
    """Return the memory of the largest step, or of sampling for all requests after it."""
    num_tokens = _most_tokens(pool)
    exchanges = cp_exchanges(config, pool, model, num_tokens)
    return max(_step_bytes(config, pool, model, num_tokens, exchange) for exchange in exchanges) / GIB


def _step_bytes(
    config: DeployConfig, pool: Pool, model: ModelFacts, num_tokens: int, exchange: CpExchange | None
) -> float:
    decoder, itemsize = model.config, DTYPE_BYTES[model.dtype]
    of_layer = max(_layer_bytes(config, pool, model, cost, num_tokens, exchange) for cost in decoder.layer_costs)
    selection = KEY_NUMBER_BYTES * (decoder.cost(model.dtype).top_k or 0)
    of_step = num_tokens * (2 * decoder.attention.rope_dim * itemsize + selection)
    draws = _DRAW_BYTES * pool.max_requests * decoder.vocab_size
    buffers = exchange.buffers + staging_bytes(config, exchange.largest_message) if exchange else 0.0
    if pool.parallel.tp > 1:
        buffers += staging_bytes(config, num_tokens * decoder.hidden_size * itemsize)
    return max(of_layer + of_step, draws) + buffers


def _layer_bytes(
    config: DeployConfig,
    pool: Pool,
    model: ModelFacts,
    cost: LayerCost,
    num_tokens: int,
    exchange: CpExchange | None,
) -> float:
    """Return the bytes of hidden states, their norm, and the widest of a layer's other activations."""
    hidden, tp, itemsize = model.config.hidden_size, pool.parallel.tp, DTYPE_BYTES[model.dtype]
    bytes_of = partial(_attention_bytes, num_tokens=num_tokens, tp=tp, itemsize=itemsize)
    attention = exchange.attention_bytes(cost, bytes_of) if exchange else max(map(bytes_of, cost.activations))
    # A rank that gathers other shards' tokens computes less of the width, but holds all tokens and their sums.
    gathered = 2 * hidden * (_num_shards(pool.parallel, model.config) - 1)
    dense = gathered + cost.dense_width / tp + (hidden if cost.experts_per_token else 0)
    sums = 2 * hidden
    widest = max(dense, gathered + _routed_width(config, pool, model, cost), sums)
    return max(attention, num_tokens * widest * itemsize) + num_tokens * 2 * hidden * itemsize


def _attention_bytes(activations: Activations, num_tokens: int, tp: int, itemsize: int) -> float:
    is_narrow = itemsize < _WIDE_BYTES
    of_token = ((activations.width + is_narrow * activations.narrow_width) / tp + activations.whole_width) * itemsize
    of_token += activations.wide_width / tp * _WIDE_BYTES
    return num_tokens * of_token + activations.size / tp * itemsize + activations.num_bytes


def _routed_width(config: DeployConfig, pool: Pool, model: ModelFacts, cost: LayerCost) -> float:
    """Return the elements per token of experts. A CPU computes one expert after another, at worst for all tokens."""
    if not cost.experts_per_token:
        return 0.0
    width = cost.routed_width / pool.parallel.tp + _answers_width(model.config) / pool.parallel.ep
    one_expert = cost.routed_width / cost.experts_per_token / pool.parallel.tp + 2 * model.config.hidden_size
    return min(width, one_expert) if config.resources.device is Device.CPU else width


def _most_tokens(pool: Pool) -> int:
    """Return the number of tokens in the largest step on one CP rank."""
    if isinstance(pool, DecodeConfig):
        return pool.chunk_tokens
    return max(
        make_step_shape([dummy_request(pool.chunk_tokens)], pool.strategy.fullest, cp=pool.parallel.cp).shard_lens
    )


def graph_bytes(config: DeployConfig, pool: Pool, model: ModelFacts) -> float:
    """Return the bytes of CUDA graphs: the largest step, which all graphs share, and their page tables and nodes."""
    flags = {"has_windows": model.geometry.has_windows, "has_experts": bool(model.config.experts_per_token)}
    if config.resources.device is not Device.CUDA or not captures_decode(config, pool, **flags):
        return 0.0
    sizes, most_keys = batch_sizes(pool.max_requests), model.config.max_position_embeddings
    tables = sum(sizes) * pages_for(most_keys, config.kv.page_size) * _PAGE_ID_BYTES
    num_scores = min(pool.max_requests * most_keys, max(MOST_CAPTURED_SCORES, most_keys))
    parallel, hidden, shards = pool.parallel, model.config.hidden_size, _num_shards(pool.parallel, model.config)
    attention = max(each.width for cost in model.config.layer_costs for each in cost.activations)
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
