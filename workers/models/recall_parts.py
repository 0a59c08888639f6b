"""Parts that every variant of recall has: sizes, the residual stream, codes, tables, and layers without MLPs.

Needs only NumPy, so that the command line can build the models.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.models.recall_marks import MARK_LEVELS

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]

VOCAB_SIZE = 4096
"""Number of tokens of which texts consist. Marks have the ids that follow."""
BEGIN_ID = 0
"""Token without a code. If a text starts with it and has nothing to repeat, the answer is END."""
END_ID = 1
CODE_SIZE = 64
NUM_HEADS = 2
HIDDEN_SIZE = 256
INTERMEDIATE_SIZE = CODE_SIZE // 2
MAX_LEN = 131_072

CURRENT, PREVIOUS, PREDICTED = (slice(start, start + CODE_SIZE) for start in (0, CODE_SIZE, 2 * CODE_SIZE))
ONE, IS_BEGIN, IS_MARK = range(3 * CODE_SIZE, 3 * CODE_SIZE + 3)
"""Parts of the residual stream: three codes, the constant 1, and flags for tokens without a code: BEGIN and marks."""

PREVIOUS_SCORE = 4000.0
"""Layer 0's attention score at the previous token, in nats. The next best score is about 100 lower."""
MATCH_SCORE = 120.0
"""Layer 1's attention score at a match. Elsewhere, the codes' correlation limits the score to an eighth."""
SINK_SCORE = 60.0
"""Layer 1's attention score at BEGIN: lower than at a match and higher than elsewhere."""
LOGIT_SCALE = 40.0
END_LEVEL = 0.25
"""Logit of END, as a fraction of the logit of an unambiguous prediction. END wins if there is no match."""
SINK_LEVEL = 0.07
"""Addition to END and marks at the sink, which makes them more likely than all other tokens together."""


def shared_config() -> dict[str, Any]:
    """Return the fields of config.json that are the same in all variants."""
    return {
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE + len(MARK_LEVELS),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def model_tensors(layers: Sequence[Mapping[str, Array]], *, negates: bool = False) -> Tensors:
    """Return all tensors of a model, given those of its layers without norms.

    If ``negates``, the layers negate the prediction, and the output table negates it again.
    """
    codes = token_codes()
    codes[BEGIN_ID] = 0
    embedding = np.zeros((VOCAB_SIZE + len(MARK_LEVELS), HIDDEN_SIZE), dtype=np.float32)
    embedding[:VOCAB_SIZE, CURRENT] = codes
    embedding[:, ONE] = 1
    embedding[BEGIN_ID, IS_BEGIN] = 1
    embedding[VOCAB_SIZE:, IS_MARK] = 1
    head = np.zeros_like(embedding)
    # The last residual has four unit parts: two codes, the constant and the prediction.
    head[:VOCAB_SIZE, PREDICTED] = LOGIT_SCALE * undo_norm(4) * (-codes if negates else codes)
    head[END_ID, ONE] = LOGIT_SCALE * undo_norm(4) * END_LEVEL
    # Marks are predicted where END is, and are less likely there.
    head[VOCAB_SIZE:, PREDICTED] = head[END_ID, PREDICTED]
    head[VOCAB_SIZE:, ONE] = LOGIT_SCALE * undo_norm(4) * np.array(list(MARK_LEVELS.values()))
    norm = ones(HIDDEN_SIZE)
    named = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": norm}
    for number, layer in enumerate(layers):
        norms = {"input_layernorm.weight": norm, "post_attention_layernorm.weight": norm}
        named |= {f"model.layers.{number}.{name}": tensor for name, tensor in {**layer, **norms}.items()}
    return named


def sink_value() -> Array:
    """Return what the sink predicts, ``[CODE_SIZE]``."""
    value: Array = SINK_LEVEL * token_codes()[END_ID]
    return value


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


def empty_mlp() -> Tensors:
    gate, up, down = zero_mlp()
    return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}


def zero_mlp() -> tuple[Array, Array, Array]:
    """Return zeros for gate, up and down."""
    wide = (INTERMEDIATE_SIZE, HIDDEN_SIZE)
    return np.zeros(wide, np.float32), np.zeros(wide, np.float32), np.zeros(wide[::-1], np.float32)


def undo_norm(num_parts: int, size: int = HIDDEN_SIZE) -> float:
    """Return the inverse of RMSNorm's factor for ``size`` elements with ``num_parts`` unit parts."""
    return float(np.sqrt(num_parts / size))


def ones(size: int) -> Array:
    return np.ones(size, dtype=np.float32)


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
