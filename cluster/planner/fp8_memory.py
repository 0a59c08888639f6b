"""Memory that weights in FP8 save on GPUs, which multiply by them as they are stored."""

from cluster.planner.model import ModelFacts
from cluster.spec.config import Pool
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.ranks import head_copies, moe_tp_size
from workers.layers.config import MoeConfig

_SCALE_BYTES = 4


def saved_bytes(pool: Pool, model: ModelFacts, layers: range) -> float:
    """Return by how many bytes a rank's weights of some layers are smaller in FP8 than in the model's dtype.

    All projections that can stay in FP8 are assumed to be stored in it.
    """
    return sum(_in_attention(pool, model, layer) + _in_feed_forward(pool, model, layer) for layer in layers)


def _in_attention(pool: Pool, model: ModelFacts, layer: int) -> float:
    hidden, tp, attention = model.config.hidden_size, pool.parallel.tp, model.config.attention_of(layer)
    copies = head_copies((group.num_heads for group in model.geometry.groups), tp)
    saved = _saved(model, model.config.layer_costs[layer].kv * copies / tp, hidden)
    saved += sum(_saved(model, matrix.size, matrix.inputs) for matrix in attention.whole_matrices(hidden))
    if pool.linear_shards is None:
        queries, out = attention.projections(hidden)
        saved += _saved(model, queries.size / tp, queries.inputs) + _saved(model, out.size / tp, out.inputs, tp)
    return saved


def _in_feed_forward(pool: Pool, model: ModelFacts, layer: int) -> float:
    parallel, cost, feed_forward = pool.parallel, model.config.layer_costs[layer], model.config.feed_forward[layer]
    dense_parts = parallel.dp * parallel.tp
    saved = _in_mlp(model, cost.dense / dense_parts, feed_forward.dense_size, dense_parts)
    if isinstance(feed_forward, MoeConfig):
        held = cost.experts * parallel.moe_dp / (parallel.cp * dense_parts)
        saved += _in_mlp(model, held, feed_forward.intermediate_size, moe_tp_size(parallel))
    return saved


def _in_mlp(model: ModelFacts, num_elements: float, width: int, parts: int) -> float:
    """Return the bytes saved in gated MLPs whose width is divided into parts. A third of the elements project down."""
    down = _saved(model, num_elements / 3, width, parts) if width else 0.0
    return _saved(model, num_elements * 2 / 3, model.config.hidden_size) + down


def _saved(model: ModelFacts, num_elements: float, inputs: int, parts: int = 1) -> float:
    """Return the bytes saved in elements of matrices whose inputs are divided into parts."""
    size = -(-inputs // parts)
    width = model.config.weight_format.fp8_width(inputs, size if parts > 1 else 0, size)
    if width is None:
        return 0.0
    return num_elements * (DTYPE_BYTES[model.dtype] - 1 - _SCALE_BYTES * -(-size // width) / size)
