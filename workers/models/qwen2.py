"""Qwen2: like Llama, with biases on Q, K and V only."""

from workers.layers.config import MlpConfig
from workers.models.hf_config import HfConfig, read_attention, read_decoder, read_windows
from workers.models.interface import DecoderConfig


def read(hf: HfConfig) -> DecoderConfig:
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    return read_decoder(hf, read_attention(hf, qkv_bias=True), [mlp] * hf.num_layers, read_windows(hf))
