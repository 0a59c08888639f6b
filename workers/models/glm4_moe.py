"""GLM-4.5 to GLM-4.7, with grouped-query attention that rotates a part of each head, and GLM-4.7-Flash, with latent
attention. Both have DeepSeek-V3's experts.
"""

from typing import Any

from workers.models.deepseek import V3_DEFAULTS, read_layers, read_v3, sparse_flags, v3_router
from workers.models.hf_config import HfConfig, read_partial_attention
from workers.models.interface import DecoderConfig

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
FLASH_DEFAULTS: dict[str, Any] = {
    **V3_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
}


def read(hf: HfConfig) -> DecoderConfig:
    attention = read_partial_attention(hf, qkv_bias=hf.flag("attention_bias"), qk_norm=hf.flag("use_qk_norm"))
    return read_layers(hf, attention, v3_router(hf))


def read_flash(hf: HfConfig) -> DecoderConfig:
    return read_v3(hf, sparse_flags(hf))
