"""Variants of recall, and the constructed weights of a Llama that repeats what followed an earlier occurrence of the
current token.

Two attention layers form an induction head. Layer 0 attends to the previous token and stores its code. Layer 1 attends
to the positions whose previous token equals the current token, and predicts the tokens there. In the Mixtral variant,
experts negate the prediction, and the output table negates it again. See `recall_latent` for latent attention.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np

from workers.models import recall_latent
from workers.models.recall_parts import (
    CODE_SIZE,
    CURRENT,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    IS_BEGIN,
    IS_MARK,
    MATCH_SCORE,
    NUM_HEADS,
    ONE,
    PREDICTED,
    PREVIOUS,
    PREVIOUS_SCORE,
    SINK_SCORE,
    Tensors,
    empty_mlp,
    model_tensors,
    shared_config,
    sink_value,
    undo_norm,
    zero_mlp,
)


class Variant(StrEnum):
    """Built-in model by name. All give the same answers."""

    DENSE = "recall"
    EXPERTS = "recall-moe"
    LATENT = "recall-latent"
    """Latent attention, as in DeepSeek-V3."""
    SPARSE = "recall-sparse"
    """Latent attention to selected keys, as in DeepSeek-V3.2."""


BUILT_IN = tuple(Variant)

HEAD_DIM = 128
NUM_EXPERTS = 4
FIRST_SIGN = 2
"""First of two signs in a token's code that choose its experts. Earlier signs depend on two bits of its id only."""
ROPE_THETA = 1e12
"""Base at which half the frequencies separate adjacent tokens. Over MAX_LEN, the rest rotate less than 0.14 rad."""

FAST = slice(0, HEAD_DIM // 4)
"""First dimensions of the fast frequency pairs. The second dimension of each pair is HEAD_DIM / 2 higher."""
SLOW_FIRST, SLOW_SECOND = slice(HEAD_DIM // 4, HEAD_DIM // 2), slice(3 * HEAD_DIM // 4, HEAD_DIM)
SINK_DIM = HEAD_DIM // 4 - 1
"""Slowest of the fast pairs, unused in layer 1."""
GATE = 16.0
"""Constant gate value of every expert, large enough that SiLU leaves it unchanged."""

_DENSE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_WITH_EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def config(variant: Variant) -> dict[str, Any]:
    """Return the contents of config.json without the end tokens, which come from the tokenizer."""
    if variant in (Variant.LATENT, Variant.SPARSE):
        return {**shared_config(), **recall_latent.config(has_indexer=variant is Variant.SPARSE)}
    return {
        **(_WITH_EXPERTS if variant is Variant.EXPERTS else _DENSE),
        **shared_config(),
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "mlp_bias": False,
    }


def tensors(variant: Variant) -> Tensors:
    """Return the checkpoint's fp32 tensors under their names in transformers."""
    if variant in (Variant.LATENT, Variant.SPARSE):
        return model_tensors(recall_latent.layers(has_indexer=variant is Variant.SPARSE))
    has_experts = variant is Variant.EXPERTS
    attention = [_attention(fill) for fill in (_previous_token_attention, _matching_attention)]
    return model_tensors(
        [each | (_experts() if has_experts else empty_mlp()) for each in attention], negates=has_experts
    )


def _attention(fill: Callable[[Tensors], None]) -> Tensors:
    kv_shape, q_shape = (HEAD_DIM, HIDDEN_SIZE), (NUM_HEADS * HEAD_DIM, HIDDEN_SIZE)
    attention = {
        name: np.zeros(shape, np.float32) for name, shape in (("q", q_shape), ("k", kv_shape), ("v", kv_shape))
    }
    attention["o"] = np.zeros((HIDDEN_SIZE, NUM_HEADS * HEAD_DIM), np.float32)
    fill(attention)
    return {f"self_attn.{name}_proj.weight": tensor for name, tensor in attention.items()}


def _experts() -> Tensors:
    """Return experts of which 0 and 1 negate the first half of the prediction, and 2 and 3 the second half.

    Two signs in the current token's code choose one expert of each pair, with equal weights. Negating only one half
    would predict another token, since codes include all linear forms.
    """
    router = np.zeros((NUM_EXPERTS, HIDDEN_SIZE), np.float32)
    named = {"block_sparse_moe.gate.weight": router}
    for expert in range(NUM_EXPERTS):
        half, is_negative = divmod(expert, 2)
        router[expert, CURRENT.start + FIRST_SIGN + half] = -1 if is_negative else 1
        router[expert, [IS_BEGIN, IS_MARK]] = 0 if is_negative else 1
        first = PREDICTED.start + half * INTERMEDIATE_SIZE
        mine = slice(first, first + INTERMEDIATE_SIZE)
        gate, up, down = zero_mlp()
        gate[:, ONE] = GATE * undo_norm(4)
        up[:, mine] = undo_norm(4) * np.eye(INTERMEDIATE_SIZE)
        down[mine] = -4 / GATE * np.eye(INTERMEDIATE_SIZE)
        named |= {
            f"block_sparse_moe.experts.{expert}.{name}.weight": tensor
            for name, tensor in (("w1", gate), ("w3", up), ("w2", down))
        }
    return named


def _previous_token_attention(attention: Tensors) -> None:
    """Fill layer 0. Queries and keys are constants in the fast pairs, with keys one position ahead."""
    frequencies = ROPE_THETA ** -(np.arange(FAST.stop) * 2 / HEAD_DIM)
    amplitude = np.sqrt(PREVIOUS_SCORE * np.sqrt(HEAD_DIM) / FAST.stop) * undo_norm(2)
    attention["q"][FAST, ONE] = amplitude
    attention["k"][FAST, ONE] = amplitude * np.cos(frequencies)
    attention["k"][HEAD_DIM // 2 : HEAD_DIM // 2 + FAST.stop, ONE] = amplitude * np.sin(frequencies)
    attention["v"][:CODE_SIZE, CURRENT] = undo_norm(2) * np.eye(CODE_SIZE)
    attention["o"][PREVIOUS, :CODE_SIZE] = np.eye(CODE_SIZE)


def _matching_attention(attention: Tensors) -> None:
    """Fill layer 1. Queries are the current token's code and keys the previous token's code, both in the slow pairs."""
    identity = np.sqrt(MATCH_SCORE * np.sqrt(HEAD_DIM)) * undo_norm(3) * np.eye(CODE_SIZE)
    for pairs, half in ((SLOW_FIRST, slice(0, CODE_SIZE // 2)), (SLOW_SECOND, slice(CODE_SIZE // 2, CODE_SIZE))):
        attention["q"][pairs, CURRENT] = identity[half]
        attention["k"][pairs, PREVIOUS] = identity[half]
    attention["q"][SINK_DIM, ONE] = np.sqrt(SINK_SCORE * np.sqrt(HEAD_DIM)) * undo_norm(3)
    attention["k"][SINK_DIM, IS_BEGIN] = np.sqrt(SINK_SCORE * np.sqrt(HEAD_DIM)) * undo_norm(2)
    attention["v"][:CODE_SIZE, CURRENT] = undo_norm(3) * np.eye(CODE_SIZE)
    attention["v"][:CODE_SIZE, IS_BEGIN] = undo_norm(2) * sink_value()
    attention["o"][PREDICTED, :CODE_SIZE] = np.eye(CODE_SIZE)
