"""Qwen3: like Llama, with normalized queries and keys and an independent head size."""

from workers.layers.config import MlpConfig
from workers.models.hf_config import HfConfig, read_attention, read_decoder, read_windows
from workers.models.interface import DecoderConfig


def read(hf: HfConfig) -> DecoderConfig:
    has_bias = hf.flag("attention_bias")
    attention = read_attention(hf, head_dim=128, qkv_bias=has_bias, output_bias=has_bias, qk_norm=True)
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    return read_decoder(hf, attention, [mlp] * hf.num_layers, read_windows(hf))
