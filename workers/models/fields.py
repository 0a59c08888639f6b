"""Readers for parts of a config.json that several families spell alike."""

from collections.abc import Mapping, Sequence

from cluster.spec.kv import FULL_ATTENTION, SLIDING_ATTENTION
from workers.layers.config import AttentionConfig, FeedForwardConfig, MlpConfig, MoeConfig
from workers.models.hf_config import HfConfig, UnsupportedModelError, read_rope_config
from workers.models.interface import DecoderConfig


def read_decoder(
    hf: HfConfig,
    attention: AttentionConfig,
    feed_forward: Sequence[FeedForwardConfig],
    windows: Sequence[int | None] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> DecoderConfig:
    """Read everything that all families spell alike."""
    _refuse_unsupported(hf)
    max_len = hf.positive("max_position_embeddings")
    return DecoderConfig(
        vocab_size=hf.positive("vocab_size"),
        hidden_size=hf.positive("hidden_size"),
        attention=attention,
        feed_forward=tuple(feed_forward),
        windows=tuple(windows or [None] * len(feed_forward)),
        rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=read_rope_config(hf.raw, max_len),
        max_position_embeddings=max_len,
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        dtype=hf.dtype,
        eos_token_ids=hf.eos_token_ids,
        renamed=renamed or {},
    )


def read_attention(hf: HfConfig, *, head_dim: int | None = None, **flags: bool) -> AttentionConfig:
    """Read numbers and size of heads; ``head_dim`` is the family's default."""
    num_heads = hf.positive("num_attention_heads")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=hf.positive("num_key_value_heads", num_heads),
        head_dim=hf.positive("head_dim", head_dim or hf.positive("hidden_size") // num_heads),
        **flags,
    )


def read_experts(hf: HfConfig, *, renormalize: bool, intermediate_size: str, shared_size: int = 0) -> MoeConfig:
    """Read numbers and size of experts; ``intermediate_size`` is the key of their width."""
    num_experts = hf.positive("num_experts" if "num_experts" in hf.raw else "num_local_experts")
    top_k = hf.positive("num_experts_per_tok")
    if top_k > num_experts:
        raise UnsupportedModelError(f"num_experts_per_tok is {top_k}; allowed: at most {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=hf.positive(intermediate_size),
        renormalize=renormalize,
        shared_size=shared_size,
    )


def sparse_layers(hf: HfConfig, moe: MoeConfig) -> list[FeedForwardConfig]:
    """Return layers of experts, except those to which a Qwen checkpoint gives one MLP."""
    every, dense = hf.positive("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or ())
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    num_layers = hf.num_layers
    return [mlp if (layer + 1) % every or layer in dense else moe for layer in range(num_layers)]


def read_windows(hf: HfConfig) -> list[int | None]:
    """Return the window of each layer of a dense Qwen model: by `layer_types`, or from `max_window_layers` on."""
    num_layers, is_used = hf.num_layers, uses_sliding_window(hf)
    num_full = hf.get("max_window_layers", 28) if is_used else num_layers
    by_number = [FULL_ATTENTION if layer < num_full else SLIDING_ATTENTION for layer in range(num_layers)]
    layer_types = hf.get("layer_types") or by_number
    if len(layer_types) != num_layers or (unknown := set(layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION}):
        given = f"{len(layer_types)} entries" if len(layer_types) != num_layers else ", ".join(sorted(unknown))
        allowed = f"{num_layers} of {FULL_ATTENTION}, {SLIDING_ATTENTION}"
        raise UnsupportedModelError(f"layer_types has {given}; allowed: {allowed}")
    window = hf.positive("sliding_window", 4096)
    return [window if layer_type == SLIDING_ATTENTION and is_used else None for layer_type in layer_types]


def refuse_sliding_window(hf: HfConfig, *, is_used: bool) -> None:
    """Refuse windows in any layer; ``is_used`` is the default of a checkpoint without `layer_types`."""
    layer_types = hf.get("layer_types")
    if layer_types is not None:
        is_used = any(layer_type != "full_attention" for layer_type in layer_types)
    if is_used:
        raise UnsupportedModelError("the model uses sliding-window attention; only full attention is supported")


def uses_sliding_window(hf: HfConfig) -> bool:
    """Return whether Qwen's switches turn windows on."""
    return hf.flag("use_sliding_window") and hf.get("sliding_window", 4096) is not None


def _refuse_unsupported(hf: HfConfig) -> None:
    if quantization := hf.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed")
        raise UnsupportedModelError(f"the checkpoint is quantized ({method}); allowed are float32, bfloat16, float16")
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {activation!r}; allowed is 'silu'")
