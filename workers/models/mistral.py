"""Mistral: like Llama, with a window in every layer, in some (Ministral), or in none."""

from cluster.spec.kv import FULL_ATTENTION, SLIDING_ATTENTION
from workers.layers.config import MlpConfig
from workers.models.hf_config import HfConfig, every_layers_window, read_attention, read_decoder
from workers.models.interface import DecoderConfig

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096}


def read(hf: HfConfig) -> DecoderConfig:
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    return read_decoder(hf, read_attention(hf), [mlp] * hf.num_layers, _windows(hf))


def _windows(hf: HfConfig) -> list[int | None]:
    """Return each layer's window. Without `layer_types`, all layers have one, unless `sliding_window` is null."""
    windows = every_layers_window(hf)
    if (given := hf.get("layer_types")) is None:
        return windows
    types = hf.by_layer("layer_types", given, FULL_ATTENTION, SLIDING_ATTENTION)
    return [window if each == SLIDING_ATTENTION else None for window, each in zip(windows, types, strict=True)]
