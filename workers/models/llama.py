"""Llama: grouped-query attention and a gated MLP in each layer, with or without biases."""

from workers.layers.config import MlpConfig
from workers.models.hf_config import HfConfig, read_attention, read_decoder
from workers.models.interface import DecoderConfig

DEFAULTS = {"rms_norm_eps": 1e-6}


def read(hf: HfConfig) -> DecoderConfig:
    has_bias = hf.flag("attention_bias")
    attention = read_attention(hf, qkv_bias=has_bias, output_bias=has_bias)
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"), bias=hf.flag("mlp_bias"))
    return read_decoder(hf, attention, [mlp] * hf.num_layers)
