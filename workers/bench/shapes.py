"""Model shapes that benchmarks run with random weights, and their minimum work. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.attention.runs import Run

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchShape:
    family: str
    layers: int
    hidden: int
    inner: int
    """Width of the MLP."""
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    tied: bool = False
    """True if embedding and output layer share one matrix."""

    def config_json(self, max_len: int = 1 << 18) -> dict[str, Any]:
        return {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": max_len,
        }

    @property
    def num_weights(self) -> int:
        """Return the number of elements in all matrices. Norms are not counted."""
        # The command line needs only the shapes' names.
        from workers.models.registry import parse_model_config

        return parse_model_config(self.config_json()).num_weights

    @property
    def kv_row_len(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    def prefill_flops(self, prompt_len: int) -> float:
        """Return the FLOPs of a prefill: two per layer weight and token, four per head dimension and visible pair.

        The output layer computes only the last token.
        """
        pairs = Run(0, 0, prompt_len, 1).num_pairs
        products = self._layer_weights * prompt_len + self._output_weights
        return 2.0 * products + 4.0 * self.layers * self.heads * self.head_dim * pairs

    def decode_bytes(self, num_keys: float, itemsize: int) -> float:
        """Return the bytes that a decode step reads: weights of layers and output, and KV of ``num_keys`` tokens."""
        return itemsize * (self._layer_weights + self._output_weights + self.layers * self.kv_row_len * num_keys)

    @property
    def _output_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def _layer_weights(self) -> int:
        """Return the number of weights without output and embedding. Only single rows of the embedding are read."""
        return self.num_weights - self._output_weights * (1 if self.tied else 2)


SHAPES: Mapping[str, BenchShape] = {
    "Llama-3-8B": BenchShape(family="llama", layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=128_256),
    "Llama-3-70B": BenchShape(family="llama", layers=80, hidden=8192, inner=28672, heads=64, kv_heads=8, vocab=128_256),
    "Qwen3-8B": BenchShape(family="qwen3", layers=36, hidden=4096, inner=12288, heads=32, kv_heads=8, vocab=151_936),
    "Qwen3-0.6B": BenchShape(
        family="qwen3", layers=28, hidden=1024, inner=3072, heads=16, kv_heads=8, vocab=151_936, tied=True
    ),
    "small": BenchShape(family="qwen3", layers=8, hidden=512, inner=1536, heads=8, kv_heads=4, vocab=4096, head_dim=64),
    "tiny": BenchShape(family="llama", layers=2, hidden=64, inner=96, heads=4, kv_heads=2, vocab=256, head_dim=16),
}
"""Shapes of models with grouped-query attention, by name. The last two are meant for CPUs."""

_SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
_EXPERTS: Mapping[str, Any] = {
    **_SMALL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_LATENT: Mapping[str, Any] = {
    **_SMALL,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 192,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_INDEXED: Mapping[str, Any] = {
    **_LATENT,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 512,
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "small-moe": _EXPERTS,
    "small-latent": _LATENT,
    "small-sparse": _INDEXED,
}
"""config.json of models as wide as ``small``, by name: with experts, or latent attention to all or selected keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Latent attention with an indexer, on one rank."""

    heads: int
    plain_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    kv_rank: int = 512
    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 2048

    @property
    def stored_dim(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def pair_flops(self) -> int:
        """Return the FLOPs of a query and a key as stored."""
        return 2 * self.heads * (self.stored_dim + self.kv_rank)


LATENT_SHAPES: Mapping[str, LatentShape] = {
    "DeepSeek-V3.2": LatentShape(heads=128),
    "DeepSeek-V3.2-tp8": LatentShape(heads=16),
}
"""Attention shapes by name: DeepSeek-V3.2 with all heads on one rank, and with an eighth of them."""


def config_json(name: str, max_len: int) -> dict[str, Any]:
    """Return the config.json of a model of ``SHAPES`` or ``VARIANTS``."""
    if name in VARIANTS:
        return {**VARIANTS[name], "max_position_embeddings": max_len}
    return SHAPES[name].config_json(max_len)
