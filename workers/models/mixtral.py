"""Mixtral: Mistral's attention, and experts in every layer, with renormalized weights."""

from workers.models.hf_config import HfConfig, every_layers_window, read_attention, read_decoder, read_experts
from workers.models.interface import DecoderConfig

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}


def read(hf: HfConfig) -> DecoderConfig:
    moe = read_experts(hf, renormalize=True, intermediate_size="intermediate_size")
    return read_decoder(
        hf,
        read_attention(hf),
        [moe] * hf.num_layers,
        every_layers_window(hf),
        renamed={"mlp": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"},
    )
