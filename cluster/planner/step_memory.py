"""Estimates of the memory of a worker's largest step: activations, exchanges between ranks, and CUDA graphs."""

from functools import partial

from cluster.planner.exchange_memory import KEY_NUMBER_BYTES, FormBytes, KvExchange, cp_exchanges, staging_bytes
from cluster.planner.model import ModelFacts
from cluster.spec.config import AnyParallel, DecodeConfig, DeployConfig, Device, Pool
from cluster.spec.decode_graphs import batch_sizes, captures_decode
from cluster.spec.kv import DTYPE_BYTES, pages_for
from cluster.spec.memory import GIB
from cluster.spec.ranks import moe_tp_size, num_expert_shards
from workers.attention.limits import MOST_CAPTURED_SCORES
from workers.context_parallel.shard_plan import dummy_request, make_step_shape
from workers.expert_parallel.dispatch_cost import CHOICE_BYTES
from workers.layers.attention_config import Activations, AttentionForm
from workers.layers.config import FEW_CHOICES, MOST_ANSWER_BYTES
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
    config: DeployConfig, pool: Pool, model: ModelFacts, num_tokens: int, exchange: KvExchange | None
) -> float:
    decoder, itemsize = model.config, DTYPE_BYTES[model.dtype]
    of_layer = max(_layer_bytes(config, pool, model, cost, num_tokens, exchange) for cost in decoder.layer_costs)
    selection = KEY_NUMBER_BYTES * (decoder.cost(model.dtype).top_k or 0)
    of_step = num_tokens * (2 * decoder.attention.rope_dim * itemsize + selection)
    draws = _DRAW_BYTES * pool.max_requests * decoder.vocab_size
    buffers = exchange.buffers + staging_bytes(config, exchange.largest_message) if exchange else 0.0
    buffers += sum(staging_bytes(config, num_tokens * row) for row in _exchanged_rows(pool.parallel, decoder, itemsize))
    return max(of_layer + of_step, draws) + buffers


def _exchanged_rows(parallel: AnyParallel, decoder: DecoderConfig, itemsize: int) -> list[int]:
    """Return the largest bytes per token that travel in each group in which ranks exchange hidden states."""
    row = decoder.hidden_size * itemsize
    rows = [row] * ((parallel.tp > 1) + (parallel.dp > 1))
    if decoder.experts_per_token and _num_shards(parallel, decoder) > 1:
        rows += [row + decoder.experts_per_token * CHOICE_BYTES] * 2  # one group to gather tokens, one to send them
    return rows


def _layer_bytes(
    config: DeployConfig,
    pool: Pool,
    model: ModelFacts,
    cost: LayerCost,
    num_tokens: int,
    exchange: KvExchange | None,
) -> float:
    """Return the bytes of hidden states, their norm, and the widest of a layer's other activations."""
    hidden, tp, itemsize = model.config.hidden_size, pool.parallel.tp, DTYPE_BYTES[model.dtype]
    forms = [_form_bytes(form, num_tokens, tp, itemsize) for form in cost.forms]
    attention = max(exchange.attention_bytes(form) if exchange else form.plain for form in forms)
    # A rank that gathers other shards' tokens computes less of the width, but holds all tokens and their sums.
    gathered = 2 * hidden * (pool.parallel.dp - 1)
    dense = gathered + cost.dense / hidden / tp + (hidden if cost.experts_per_token else 0)
    row, experts = num_tokens * itemsize, _expert_bytes(config, pool, model, cost, num_tokens)
    return max(attention, row * dense, row * 2 * hidden, experts) + row * 2 * hidden


def _form_bytes(form: AttentionForm, num_tokens: int, tp: int, itemsize: int) -> FormBytes:
    bytes_of = partial(_attention_bytes, num_tokens=num_tokens, tp=tp, itemsize=itemsize)
    return FormBytes(
        plain=max(map(bytes_of, form.activations)),
        merging=bytes_of(form.merging),
        tile=form.tile_size / tp * itemsize,
        query=form.query_width / tp * itemsize,
        partial=form.out_width / tp * _WIDE_BYTES,
        result=form.out_width / tp * itemsize,
        selects_keys=form.selects_keys,
    )


def _attention_bytes(activations: Activations, num_tokens: int, tp: int, itemsize: int) -> float:
    is_narrow = itemsize < _WIDE_BYTES
    of_token = ((activations.width + is_narrow * activations.narrow_width) / tp + activations.whole_width) * itemsize
    of_token += activations.wide_width / tp * _WIDE_BYTES
    return num_tokens * of_token + activations.size / tp * itemsize + activations.num_bytes


def _expert_bytes(config: DeployConfig, pool: Pool, model: ModelFacts, cost: LayerCost, num_tokens: int) -> float:
    """Return the bytes of experts' activations, with those tokens of other ranks that a rank receives.

    A GPU computes all experts at once. So may a CPU in bf16, for as many tokens as their answers fit. Otherwise, it
    computes one expert after another, at worst for all tokens, and adds up in fp32.
    """
    per_token = cost.experts_per_token
    if not per_token:
        return 0.0
    hidden, itemsize = model.config.hidden_size, DTYPE_BYTES[model.dtype]
    has_all = pool.parallel.dp == 1 and num_tokens == pool.chunk_tokens  # then every rank computes all tokens
    shards = 1 if has_all else _num_shards(pool.parallel, model.config)
    inner = cost.routed / hidden / (3 * per_token * moe_tp_size(pool.parallel))
    tokens = num_tokens * shards
    received = tokens * hidden * itemsize * (shards > 1)
    if config.resources.device is Device.CPU:
        answers = hidden * (itemsize + _WIDE_BYTES * (itemsize < _WIDE_BYTES))
        widest = max(itemsize * (hidden + 2 * inner), itemsize * 3 * inner, answers)
        together = min(tokens * per_token * hidden * itemsize, MOST_ANSWER_BYTES) + tokens * hidden * itemsize
        return received + max(tokens * (hidden * _WIDE_BYTES + widest), together * (itemsize < _WIDE_BYTES))
    rows = max(tokens * per_token / pool.parallel.ep, min(tokens * per_token, FEW_CHOICES))
    return received + itemsize * max(rows * 3 * inner, rows * (inner + hidden), (rows + tokens) * hidden)


def _most_tokens(pool: Pool) -> int:
    """Return the number of tokens in the largest step on one CP rank."""
    if isinstance(pool, DecodeConfig):
        return pool.chunk_tokens
    return max(
        make_step_shape([dummy_request(pool.chunk_tokens)], pool.strategy.fullest, cp=pool.parallel.cp).shard_lens
    )


def graph_bytes(config: DeployConfig, pool: Pool, model: ModelFacts) -> float:
    """Return the bytes of CUDA graphs: the largest step, which all graphs share, and their page tables and nodes."""
    if config.resources.device is not Device.CUDA or not captures_decode(config, pool, model.config.limits):
        return 0.0
    sizes, most_keys = batch_sizes(pool.max_requests), model.config.max_position_embeddings
    tables = sum(sizes) * pages_for(most_keys, config.kv.page_size) * _PAGE_ID_BYTES
    num_scores = min(pool.max_requests * most_keys, max(MOST_CAPTURED_SCORES, most_keys))
    parallel, hidden, shards = pool.parallel, model.config.hidden_size, _num_shards(pool.parallel, model.config)
    forms = (form for cost in model.config.layer_costs for form in cost.forms)
    attention = max(each.width for form in forms for each in form.activations)
    own = 4 * hidden + attention / parallel.tp + 2 * hidden * (shards - 1)
    # Each token of each shard takes a row for each chosen expert, even if another rank holds that expert.
    inner = max(
        (cost.dense / (parallel.dp * parallel.tp) + cost.routed / moe_tp_size(parallel)) / hidden
        for cost in model.config.layer_costs
    )
    widths = own + shards * (inner + model.config.experts_per_token * hidden)
    step = pool.max_requests * widths * DTYPE_BYTES[model.dtype]
    step += _SCORE_BYTES * num_scores * model.config.selects_keys
    return tables + step + len(sizes) * model.geometry.num_layers * _GRAPH_LAYER_BYTES + _WORKSPACE_BYTES


def _num_shards(parallel: AnyParallel, config: DecoderConfig) -> int:
    """Return the number of attention shards whose tokens are gathered for one feed-forward block."""
    return num_expert_shards(parallel) if config.experts_per_token else parallel.dp
