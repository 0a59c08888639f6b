"""Qwen3: like Qwen2, with normalized queries and keys, an independent head size, and biases everywhere or nowhere."""

from workers.layers.config import MlpConfig
from workers.models import qwen2
from workers.models.hf_config import HfConfig, last_layers_windows, read_attention, read_decoder
from workers.models.interface import DecoderConfig

DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}


def read(hf: HfConfig) -> DecoderConfig:
    has_bias = hf.flag("attention_bias")
    attention = read_attention(hf, qkv_bias=has_bias, output_bias=has_bias, qk_norm=True)
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    return read_decoder(hf, attention, [mlp] * hf.num_layers, last_layers_windows(hf))
