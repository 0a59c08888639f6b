"""Qwen3-MoE: Qwen3's attention, experts in most layers, and a window in every layer or in none."""

from workers.models.hf_config import (
    HfConfig,
    every_layers_window,
    read_attention,
    read_decoder,
    read_experts,
    sparse_layers,
    uses_windows,
)
from workers.models.interface import DecoderConfig

DEFAULTS = {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "sliding_window": 4096}


def read(hf: HfConfig) -> DecoderConfig:
    has_bias = hf.flag("attention_bias")
    attention = read_attention(hf, qkv_bias=has_bias, output_bias=has_bias, qk_norm=True)
    moe = read_experts(hf, renormalize=hf.flag("norm_topk_prob"), intermediate_size="moe_intermediate_size")
    windows = every_layers_window(hf) if uses_windows(hf) else None
    return read_decoder(hf, attention, sparse_layers(hf, moe), windows)
