"""Qwen2: like Llama, with biases on Q, K and V alone."""

from workers.layers.config import MlpConfig
from workers.models.fields import read_attention, read_decoder, refuse_sliding_window, uses_sliding_window
from workers.models.hf_config import HfConfig
from workers.models.interface import DecoderConfig


def read(hf: HfConfig) -> DecoderConfig:
    """Read a config.json of the family."""
    num_layers = hf.num_layers
    refuse_sliding_window(hf, is_used=uses_sliding_window(hf) and hf.get("max_window_layers", 28) < num_layers)
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    return read_decoder(hf, read_attention(hf, qkv_bias=True), [mlp] * num_layers)
