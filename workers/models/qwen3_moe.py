"""Qwen3-MoE: Qwen3's attention, and experts in most layers."""

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
    refuse_sliding_window(hf, is_used=uses_sliding_window(hf))
    has_bias = hf.flag("attention_bias")
    attention = read_attention(hf, qkv_bias=has_bias, output_bias=has_bias, qk_norm=True)
    moe = read_experts(hf, renormalize=hf.flag("norm_topk_prob"), intermediate_size="moe_intermediate_size")
    return read_decoder(hf, attention, sparse_layers(hf, moe))
