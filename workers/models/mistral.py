"""Mistral: like Llama, with a window in every layer, in some (Ministral), or in none."""

from cluster.spec.kv import SLIDING_ATTENTION
from workers.layers.config import MlpConfig
from workers.models.hf_config import HfConfig, given_window, read_attention, read_decoder, windows_of_types
from workers.models.interface import DecoderConfig

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096}


def read(hf: HfConfig) -> DecoderConfig:
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    given = hf.get("layer_types")
    layer_types = [SLIDING_ATTENTION] * hf.num_layers if given is None else given
    windows = windows_of_types(hf, layer_types, given_window(hf))
    return read_decoder(hf, read_attention(hf), [mlp] * hf.num_layers, windows)
