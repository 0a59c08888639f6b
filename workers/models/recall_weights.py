"""Constructed weights of recall, a Llama that repeats what followed an earlier occurrence of the current token.

Two attention layers form an induction head. Layer 0 attends to the previous token and stores its code. Layer 1 attends
to the positions whose previous token equals the current token, and predicts the tokens there. In the Mixtral variant,
experts negate the prediction, and the output table negates it again. Needs only NumPy, so that the command line can
build the model.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

BUILT_IN = {"recall": False, "recall-moe": True}
"""Built-in model names, and whether each model has experts. All give the same answers."""

VOCAB_SIZE = 4096
BEGIN_ID = 0
"""Token without a code. If a text starts with it and has nothing to repeat, the answer is END."""
END_ID = 1
CODE_SIZE = 64
HEAD_DIM = 128
NUM_HEADS = 2
HIDDEN_SIZE = NUM_HEADS * HEAD_DIM
INTERMEDIATE_SIZE = CODE_SIZE // 2
NUM_EXPERTS = 4
FIRST_SIGN = 2
"""First of two signs in a token's code that choose its experts. Earlier signs depend on two bits of its id only."""
MAX_LEN = 131_072
ROPE_THETA = 1e12
"""Base at which half the frequencies separate adjacent tokens. Over MAX_LEN, the rest rotate less than 0.14 rad."""

FAST = slice(0, HEAD_DIM // 4)
"""First dimensions of the fast frequency pairs. The second dimension of each pair is HEAD_DIM / 2 higher."""
SLOW_FIRST, SLOW_SECOND = slice(HEAD_DIM // 4, HEAD_DIM // 2), slice(3 * HEAD_DIM // 4, HEAD_DIM)
SINK_DIM = HEAD_DIM // 4 - 1
"""Slowest of the fast pairs, unused in layer 1."""

CURRENT, PREVIOUS, PREDICTED = (slice(start, start + CODE_SIZE) for start in (0, CODE_SIZE, 2 * CODE_SIZE))
ONE, IS_BEGIN = 3 * CODE_SIZE, 3 * CODE_SIZE + 1
"""Parts of the residual stream: three codes, the constant 1, and a flag for BEGIN."""

PREVIOUS_SCORE = 4000.0
"""Layer 0's attention score at the previous token, in nats. The next best score is about 100 lower."""
MATCH_SCORE = 120.0
"""Layer 1's attention score at a match. Elsewhere, the codes' correlation limits the score to an eighth."""
SINK_SCORE = 60.0
"""Layer 1's attention score at BEGIN: lower than at a match and higher than elsewhere."""
LOGIT_SCALE = 40.0
GATE = 16.0
"""Constant gate value of every expert, large enough that SiLU leaves it unchanged."""
END_LEVEL = 0.25
"""Logit of END, as a fraction of the logit of an unambiguous prediction. END wins if there is no match."""

_DENSE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_WITH_EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def config(*, has_experts: bool) -> dict[str, Any]:
    """Return the contents of config.json without the end tokens, which come from the tokenizer."""
    return {
        **(_WITH_EXPERTS if has_experts else _DENSE),
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def token_codes() -> Array:
    """Return one unit vector per token, [VOCAB_SIZE, CODE_SIZE]: the Kerdock code of length 64 as signs / 8.

    Any two have a correlation of 0 or ±1/8, except codes i and i + VOCAB_SIZE/2, which are opposite. The construction
    uses quadratic forms over GF(32) x GF(2), after MacWilliams and Sloane, The Theory of Error-Correcting Codes,
    ch. 15 §5.
    """
    bits = np.zeros((2, 32, 32, 2, CODE_SIZE), dtype=np.int64)
    for a in range(32):
        for point in range(CODE_SIZE):
            x, half = point >> 1, point & 1
            ax = _times(a, x)
            square = _times(ax, ax)
            cube = _times(square, ax)
            form = _trace(cube) ^ _trace(_times(cube, square)) ^ (half & _trace(ax))
            for b in range(32):
                linear = form ^ _trace(_times(b, x))
                bits[:, a, b, :, point] = [[linear, linear ^ half], [linear ^ 1, linear ^ half ^ 1]]
    return ((1 - 2 * bits.reshape(VOCAB_SIZE, CODE_SIZE)) / 8).astype(np.float32)


def tensors(*, has_experts: bool) -> dict[str, Array]:
    """Return the checkpoint's fp32 tensors under their names in transformers."""
    codes = token_codes()
    codes[BEGIN_ID] = 0
    embedding = np.zeros((VOCAB_SIZE, HIDDEN_SIZE), dtype=np.float32)
    embedding[:, CURRENT] = codes
    embedding[:, ONE] = 1
    embedding[BEGIN_ID, IS_BEGIN] = 1
    head = np.zeros_like(embedding)
    # The last residual has four unit parts: two codes, the constant and the prediction.
    predicted = -codes if has_experts else codes
    head[:, PREDICTED] = LOGIT_SCALE * _undo_norm(4) * predicted
    head[END_ID, ONE] = LOGIT_SCALE * _undo_norm(4) * END_LEVEL
    named = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": _ones()}
    for layer, attention in enumerate((_previous_token_attention, _matching_attention)):
        parts = _layer(attention) | (_experts() if has_experts else _empty_mlp())
        named |= {f"model.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return named


def _layer(fill: Callable[[dict[str, Array]], None]) -> dict[str, Array]:
    kv_shape, q_shape = (HEAD_DIM, HIDDEN_SIZE), (NUM_HEADS * HEAD_DIM, HIDDEN_SIZE)
    attention = {
        name: np.zeros(shape, np.float32) for name, shape in (("q", q_shape), ("k", kv_shape), ("v", kv_shape))
    }
    attention["o"] = np.zeros((HIDDEN_SIZE, NUM_HEADS * HEAD_DIM), np.float32)
    fill(attention)
    return {
        **{f"self_attn.{name}_proj.weight": tensor for name, tensor in attention.items()},
        "input_layernorm.weight": _ones(),
        "post_attention_layernorm.weight": _ones(),
    }


def _empty_mlp() -> dict[str, Array]:
    gate, up, down = _zero_mlp()
    return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}


def _experts() -> dict[str, Array]:
    """Return experts of which 0 and 1 negate the first half of the prediction, and 2 and 3 the second half.

    Two signs in the current token's code choose one expert of each pair, with equal weights. Negating only one half
    would predict another token, since codes include all linear forms.
    """
    router = np.zeros((NUM_EXPERTS, HIDDEN_SIZE), np.float32)
    named = {"block_sparse_moe.gate.weight": router}
    for expert in range(NUM_EXPERTS):
        half, is_negative = divmod(expert, 2)
        router[expert, CURRENT.start + FIRST_SIGN + half] = -1 if is_negative else 1
        first = PREDICTED.start + half * INTERMEDIATE_SIZE
        mine = slice(first, first + INTERMEDIATE_SIZE)
        gate, up, down = _zero_mlp()
        gate[:, ONE] = GATE * _undo_norm(4)
        up[:, mine] = _undo_norm(4) * np.eye(INTERMEDIATE_SIZE)
        down[mine] = -4 / GATE * np.eye(INTERMEDIATE_SIZE)
        named |= {
            f"block_sparse_moe.experts.{expert}.{name}.weight": tensor
            for name, tensor in (("w1", gate), ("w3", up), ("w2", down))
        }
    return named


def _zero_mlp() -> tuple[Array, Array, Array]:
    """Return zeros for gate, up and down."""
    wide = (INTERMEDIATE_SIZE, HIDDEN_SIZE)
    return np.zeros(wide, np.float32), np.zeros(wide, np.float32), np.zeros(wide[::-1], np.float32)


def _previous_token_attention(attention: dict[str, Array]) -> None:
    """Fill layer 0. Queries and keys are constants in the fast pairs, with keys one position ahead."""
    frequencies = ROPE_THETA ** -(np.arange(FAST.stop) * 2 / HEAD_DIM)
    amplitude = np.sqrt(PREVIOUS_SCORE * np.sqrt(HEAD_DIM) / FAST.stop) * _undo_norm(2)
    attention["q"][FAST, ONE] = amplitude
    attention["k"][FAST, ONE] = amplitude * np.cos(frequencies)
    attention["k"][HEAD_DIM // 2 : HEAD_DIM // 2 + FAST.stop, ONE] = amplitude * np.sin(frequencies)
    attention["v"][:CODE_SIZE, CURRENT] = _undo_norm(2) * np.eye(CODE_SIZE)
    attention["o"][PREVIOUS, :CODE_SIZE] = np.eye(CODE_SIZE)


def _matching_attention(attention: dict[str, Array]) -> None:
    """Fill layer 1. Queries are the current token's code and keys the previous token's code, both in the slow pairs."""
    identity = np.sqrt(MATCH_SCORE * np.sqrt(HEAD_DIM)) * _undo_norm(3) * np.eye(CODE_SIZE)
    for pairs, half in ((SLOW_FIRST, slice(0, CODE_SIZE // 2)), (SLOW_SECOND, slice(CODE_SIZE // 2, CODE_SIZE))):
        attention["q"][pairs, CURRENT] = identity[half]
        attention["k"][pairs, PREVIOUS] = identity[half]
    attention["q"][SINK_DIM, ONE] = np.sqrt(SINK_SCORE * np.sqrt(HEAD_DIM)) * _undo_norm(3)
    attention["k"][SINK_DIM, IS_BEGIN] = np.sqrt(SINK_SCORE * np.sqrt(HEAD_DIM)) * _undo_norm(2)
    attention["v"][:CODE_SIZE, CURRENT] = _undo_norm(3) * np.eye(CODE_SIZE)
    attention["o"][PREDICTED, :CODE_SIZE] = np.eye(CODE_SIZE)


def _undo_norm(num_parts: int) -> float:
    """Return the inverse of RMSNorm's factor for a residual with ``num_parts`` unit parts."""
    return float(np.sqrt(num_parts / HIDDEN_SIZE))


def _ones() -> Array:
    return np.ones(HIDDEN_SIZE, dtype=np.float32)


def _times(a: int, b: int) -> int:
    """Multiply in GF(32) = GF(2)[z] / (z^5 + z^2 + 1)."""
    product = 0
    for bit in range(5):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(8, 4, -1):
        if product >> bit & 1:
            product ^= 0b100101 << (bit - 5)
    return product


def _trace(a: int) -> int:
    """Map GF(32) to GF(2): a + a^2 + a^4 + a^8 + a^16."""
    total = 0
    for _ in range(5):
        total, a = total ^ a, _times(a, a)
    return total
