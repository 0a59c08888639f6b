"""What `baton bench engine` measures and reports. Pure: the process that asks needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1 << 18,
    "tie_word_embeddings": False,
}
_QWEN = _LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
}
ENGINE_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Llama-3-8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "Qwen3-8B": _QWEN
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3-0.6B": _QWEN
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "tiny": _LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
    },
}
"""As config.json has them; the last one is for a CPU."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer, of at least two tokens."""

    ttft_s: float
    tpot_s: float
    """After the first."""
    token_ids: Sequence[int]

    @classmethod
    def of(cls, start_s: float, times: Sequence[float], token_ids: Sequence[int]) -> "Timed":
        """``times`` are those at which each token was on the host."""
        return cls(times[0] - start_s, (times[-1] - times[0]) / (len(times) - 1), token_ids)


def num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((place for place, (own, other) in pairs if own != other), len(ours))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What a model cannot do without; every weight counts as used once a token, the embedding's too."""

    num_weights: int
    weight_bytes: int
    attention_width: int
    """Of the queries of all heads and layers."""
    token_bytes: int
    """K and V of a token."""

    def prefill_flops(self, prompt_len: int) -> float:
        """Each weight and each visible pair of tokens is a product and a sum, the latter in scores and in outputs."""
        pairs = prompt_len * (prompt_len + 1) / 2
        return 2.0 * self.num_weights * prompt_len + 4.0 * self.attention_width * pairs

    def decode_bytes(self, num_keys: float) -> float:
        """All weights and the KV of so many tokens are read."""
        return self.weight_bytes + self.token_bytes * num_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One line of the output; times are medians, of a greedy answer to one prompt."""

    model: str
    prompt_len: int
    output_len: int
    ttft_s: float
    tpot_s: float
    """After the first token."""
    ttft_floor_s: float
    """At the measured rate of products of matrices."""
    tpot_floor_s: float
    """At the measured bandwidth of a copy."""
    ttft_ratio: float
    """1 where nothing is lost."""
    tpot_ratio: float
    host_s: float | None
    """Of a later token's step, what the host is busy with; None where the host computes."""
    transformers_ttft_s: float | None
    transformers_tpot_s: float | None
    num_same_tokens: int | None
    """With which both answers begin."""
    transformers_problem: str | None
    """Why it has no times."""
