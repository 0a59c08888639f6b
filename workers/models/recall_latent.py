"""Constructed weights of recall with latent attention: a DeepSeek-V3, or a DeepSeek-V3.2 with indexers.

The two layers attend to the same tokens as those of `recall_weights`. Rotated parts of heads find the previous token,
and plain parts match codes. Each head returns its part of the code. Low-rank queries and latents have known norms,
which weights undo. An indexer scores tokens as its layer does.
"""

from typing import Any

import numpy as np

from workers.models.recall_parts import (
    CODE_SIZE,
    CURRENT,
    HIDDEN_SIZE,
    IS_BEGIN,
    IS_MARK,
    MATCH_SCORE,
    NUM_HEADS,
    ONE,
    PREDICTED,
    PREVIOUS,
    PREVIOUS_SCORE,
    SINK_SCORE,
    Array,
    Tensors,
    empty_mlp,
    ones,
    sink_value,
    undo_norm,
)

ROPE_DIM, PLAIN_DIM, VALUE_DIM = 64, 96, CODE_SIZE // NUM_HEADS
HEAD_DIM = PLAIN_DIM + ROPE_DIM
NUM_PAIRS = ROPE_DIM // 2
ROPE_THETA = 1e6
"""Base at which frequencies are those of recall's fast pairs."""
QUERY_RANK, KV_RANK = 96, 192
INDEX_DIM, INDEX_TOP_K = 208, 64

CODE, QUERY_ONE = slice(0, CODE_SIZE), CODE_SIZE
"""Parts of a low-rank query: the token's code, and the constant 1. Their norm is that of two unit parts."""
BEFORE, FLAG = slice(CODE_SIZE, 2 * CODE_SIZE), 2 * CODE_SIZE
"""Parts of a latent after the token's code: the previous token's code, and the flag for BEGIN."""
MARK = 2 * CODE_SIZE + 1
"""Part of latents that stands for the code of a mark, so that their norm is the same. It is unused otherwise."""
SINK_DIM = CODE_SIZE
"""Dimension of the plain part that finds BEGIN."""
_SCALE = np.sqrt(HEAD_DIM)
_QUERY = undo_norm(2, QUERY_RANK)
"""Inverse factor of the norm of low-rank queries."""


def config(*, has_indexer: bool) -> dict[str, Any]:
    """Return the fields of config.json that differ from those of the other variants."""
    indexer = {"index_n_heads": 1, "index_head_dim": INDEX_DIM, "index_topk": INDEX_TOP_K} if has_indexer else {}
    return {
        "architectures": ["DeepseekV32ForCausalLM" if has_indexer else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v32" if has_indexer else "deepseek_v3",
        **indexer,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": ROPE_DIM,
        "q_lora_rank": QUERY_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": PLAIN_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": VALUE_DIM,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "first_k_dense_replace": 2,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": CODE_SIZE // 2,
        "num_nextn_predict_layers": 0,
    }


def layers(*, has_indexer: bool) -> list[Tensors]:
    """Return the tensors of each layer without norms of hidden states, under their names in transformers."""
    layers = []
    for fill, fill_indexer in ((_previous_token, _index_previous_token), (_match, _index_match)):
        attention = _empty_attention()
        fill(attention)
        if has_indexer:
            indexer = _empty_indexer()
            fill_indexer(indexer)
            attention |= {f"indexer.{name}": tensor for name, tensor in indexer.items()}
        layers.append({f"self_attn.{name}": tensor for name, tensor in attention.items()} | empty_mlp())
    return layers


def _empty_attention() -> Tensors:
    """Return projections in which low-rank queries and latents consist of their parts, and nothing is attended."""
    queries, latents = np.zeros((QUERY_RANK, HIDDEN_SIZE), np.float32), _zeros(KV_RANK + ROPE_DIM, HIDDEN_SIZE)
    queries[CODE, CURRENT] = latents[CODE, CURRENT] = np.eye(CODE_SIZE)
    queries[QUERY_ONE, ONE] = latents[FLAG, IS_BEGIN] = latents[MARK, IS_MARK] = 1
    return {
        "q_a_proj.weight": queries,
        "q_a_layernorm.weight": ones(QUERY_RANK),
        "q_b_proj.weight": _zeros(NUM_HEADS * HEAD_DIM, QUERY_RANK),
        "kv_a_proj_with_mqa.weight": latents,
        "kv_a_layernorm.weight": ones(KV_RANK),
        "kv_b_proj.weight": _zeros(NUM_HEADS * (PLAIN_DIM + VALUE_DIM), KV_RANK),
        "o_proj.weight": _zeros(HIDDEN_SIZE, NUM_HEADS * VALUE_DIM),
    }


def _previous_token(attention: Tensors) -> None:
    """Fill layer 0. Rotated parts are constants, with keys one position ahead."""
    amplitude = np.sqrt(PREVIOUS_SCORE * _SCALE / NUM_PAIRS)
    for head in attention["q_b_proj.weight"].reshape(NUM_HEADS, HEAD_DIM, QUERY_RANK):
        head[PLAIN_DIM::2, QUERY_ONE] = amplitude * _QUERY
    ahead = attention["kv_a_proj_with_mqa.weight"][KV_RANK:, ONE]
    ahead[0::2], ahead[1::2] = amplitude * undo_norm(2) * _one_ahead()
    _return_code(attention, undo_norm(1, KV_RANK), PREVIOUS)


def _match(attention: Tensors) -> None:
    """Fill layer 1. Queries have the current token's code, and keys the previous token's code."""
    match, sink = np.sqrt(MATCH_SCORE * _SCALE), np.sqrt(SINK_SCORE * _SCALE)
    attention["kv_a_proj_with_mqa.weight"][BEFORE, PREVIOUS] = np.eye(CODE_SIZE)
    for head in attention["q_b_proj.weight"].reshape(NUM_HEADS, HEAD_DIM, QUERY_RANK):
        head[CODE, CODE] = match * _QUERY * np.eye(CODE_SIZE)
        head[SINK_DIM, QUERY_ONE] = sink * _QUERY
    for head in attention["kv_b_proj.weight"].reshape(NUM_HEADS, PLAIN_DIM + VALUE_DIM, KV_RANK):
        head[CODE, BEFORE] = match * undo_norm(2, KV_RANK) * np.eye(CODE_SIZE)
        # The latent of BEGIN has no other part.
        head[SINK_DIM, FLAG] = sink * undo_norm(1, KV_RANK)
    _return_code(attention, undo_norm(2, KV_RANK), PREDICTED)
    values = attention["kv_b_proj.weight"].reshape(NUM_HEADS, PLAIN_DIM + VALUE_DIM, KV_RANK)[:, PLAIN_DIM:]
    values[:, :, FLAG] = undo_norm(1, KV_RANK) * sink_value().reshape(NUM_HEADS, VALUE_DIM)


def _return_code(attention: Tensors, factor: float, to: slice) -> None:
    """Add each head's part of the attended token's code, times ``factor``, to a part of the residual stream."""
    value = factor * np.eye(CODE_SIZE).reshape(NUM_HEADS, VALUE_DIM, CODE_SIZE)
    heads = attention["kv_b_proj.weight"].reshape(NUM_HEADS, PLAIN_DIM + VALUE_DIM, KV_RANK)
    heads[:, PLAIN_DIM:, CODE] = value
    attention["o_proj.weight"][to] = np.eye(CODE_SIZE)


def _empty_indexer() -> Tensors:
    """Return an indexer whose only head has the weight 1 and scores nothing."""
    weights = _zeros(1, HIDDEN_SIZE)
    weights[0, ONE] = 1
    return {
        "wq_b.weight": _zeros(INDEX_DIM, QUERY_RANK),
        "wk.weight": _zeros(INDEX_DIM, HIDDEN_SIZE),
        "k_norm.weight": ones(INDEX_DIM),
        "k_norm.bias": np.zeros(INDEX_DIM, np.float32),
        "weights_proj.weight": weights,
    }


def _index_previous_token(indexer: Tensors) -> None:
    """Fill the indexer of layer 0. All keys are the norm's bias."""
    indexer["wq_b.weight"][:NUM_PAIRS, QUERY_ONE] = 1
    indexer["k_norm.bias"][:ROPE_DIM] = _one_ahead().flatten()


def _index_match(indexer: Tensors) -> None:
    """Fill the indexer of layer 1. Parts have opposite copies, so that the norm subtracts a mean of zero."""
    first = ROPE_DIM
    for sign in (1, -1):
        code, sink = slice(first, first + CODE_SIZE), first + CODE_SIZE
        indexer["wq_b.weight"][code, CODE] = indexer["wk.weight"][code, PREVIOUS] = sign * np.eye(CODE_SIZE)
        indexer["wq_b.weight"][sink, QUERY_ONE] = sign * SINK_SCORE / MATCH_SCORE
        indexer["wk.weight"][sink, IS_BEGIN] = sign
        first = sink + 1


def _one_ahead() -> Array:
    """Return cosines and sines of one position, ``[2, NUM_PAIRS]``."""
    frequencies = ROPE_THETA ** -(np.arange(NUM_PAIRS) / NUM_PAIRS)
    return np.stack((np.cos(frequencies), np.sin(frequencies))).astype(np.float32)


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)
