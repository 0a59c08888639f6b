"""Qwen2-MoE: Qwen2's attention, experts in most layers, and one expert that all tokens share."""

from workers.models.hf_config import (
    HfConfig,
    read_attention,
    read_decoder,
    read_experts,
    refuse_sliding_window,
    sparse_layers,
    uses_sliding_window,
)
from workers.models.interface import DecoderConfig


def read(hf: HfConfig) -> DecoderConfig:
    # Unlike in Qwen2, the first layers have the windows.
    refuse_sliding_window(hf, is_used=uses_sliding_window(hf) and hf.get("max_window_layers", 28) > 0)
    moe = read_experts(
        hf,
        renormalize=hf.flag("norm_topk_prob"),
        intermediate_size="moe_intermediate_size",
        shared_size=hf.positive("shared_expert_intermediate_size"),
    )
    return read_decoder(hf, read_attention(hf, qkv_bias=hf.flag("qkv_bias", True)), sparse_layers(hf, moe))
