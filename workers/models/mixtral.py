"""Mixtral: experts in every layer, with renormalized weights."""

from workers.models.hf_config import HfConfig, read_attention, read_decoder, read_experts, refuse_sliding_window
from workers.models.interface import DecoderConfig


def read(hf: HfConfig) -> DecoderConfig:
    refuse_sliding_window(hf, is_used=hf.get("sliding_window") is not None)
    moe = read_experts(hf, renormalize=True, intermediate_size="intermediate_size")
    return read_decoder(
        hf,
        read_attention(hf),
        [moe] * hf.num_layers,
        renamed={"mlp": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"},
    )
