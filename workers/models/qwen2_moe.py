"""Qwen2-MoE: Qwen2's attention, experts in most layers, and one expert that all tokens share."""

from workers.models.hf_config import (
    HfConfig,
    read_attention,
    read_decoder,
    read_experts,
    sparse_layers,
    windows_by_type,
)
from workers.models.interface import DecoderConfig

DEFAULTS = {"num_key_value_heads": 16, "rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28}


def read(hf: HfConfig) -> DecoderConfig:
    moe = read_experts(
        hf,
        renormalize=hf.flag("norm_topk_prob"),
        intermediate_size="moe_intermediate_size",
        shared_size=hf.positive("shared_expert_intermediate_size"),
    )
    # Unlike in Qwen2, every other one of the first layers has a window.
    has_window = [layer % 2 == 0 and layer < hf.get("max_window_layers") for layer in range(hf.num_layers)]
    attention = read_attention(hf, qkv_bias=hf.flag("qkv_bias", True))
    return read_decoder(hf, attention, sparse_layers(hf, moe), windows_by_type(hf, has_window))
