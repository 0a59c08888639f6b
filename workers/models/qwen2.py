"""Qwen2: like Llama, with biases on Q, K and V only, and optionally windows in the last layers."""

from workers.layers.config import MlpConfig
from workers.models.hf_config import HfConfig, last_layers_windows, read_attention, read_decoder
from workers.models.interface import DecoderConfig

DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28}


def read(hf: HfConfig) -> DecoderConfig:
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    return read_decoder(hf, read_attention(hf, qkv_bias=True), [mlp] * hf.num_layers, last_layers_windows(hf))
