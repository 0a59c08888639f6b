"""Mistral: like Llama, with a window in every layer or in none."""

from workers.layers.config import MlpConfig
from workers.models.hf_config import HfConfig, every_layers_window, read_attention, read_decoder
from workers.models.interface import DecoderConfig

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096}


def read(hf: HfConfig) -> DecoderConfig:
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    return read_decoder(hf, read_attention(hf), [mlp] * hf.num_layers, every_layers_window(hf))
