"""Small random checkpoints written by transformers, with logits spread widely enough for token-by-token comparison."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

DENSE: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
MOE: dict[str, type[PretrainedConfig]] = {
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "glm4_moe": Glm4MoeConfig,
}
LATENT: dict[str, type[PretrainedConfig]] = {
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "glm4_moe_lite": Glm4MoeLiteConfig,
}
"""Families with latent attention and experts."""
INDEXED: dict[str, type[PretrainedConfig]] = {"deepseek_v32": DeepseekV32Config, "glm_moe_dsa": GlmMoeDsaConfig}
"""Families with latent attention and experts, in which a query uses the keys that an indexer selects."""
FAMILIES = DENSE | MOE | LATENT | INDEXED

SHARPENED: dict[str, str | tuple[str, ...]] = {
    "llama": "q_proj.weight",
    "mistral": "q_proj.weight",
    "qwen2": "q_proj.weight",
    "qwen3": "q_norm.weight",
    "qwen2_moe": "q_proj.weight",
    "qwen3_moe": "q_norm.weight",
    "mixtral": "q_proj.weight",
    "glm4_moe": ("q_proj.weight", "q_norm.weight"),
    "deepseek_v2": ("q_proj.weight", "q_b_proj.weight"),
    "deepseek_v3": ("q_proj.weight", "q_b_proj.weight"),
    "glm4_moe_lite": ("q_proj.weight", "q_b_proj.weight"),
    "deepseek_v32": "q_b_proj.weight",
    "glm_moe_dsa": "q_b_proj.weight",
}
"""Weights that are scaled up, so that answers depend on the whole prompt and do not loop."""

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


_LATENT_SHAPE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}
_INDEXED_SHAPE: dict[str, Any] = {
    **_LATENT_SHAPE,
    "num_hidden_layers": 3,
    "index_topk": 8,
    "index_n_heads": 4,
    "index_head_dim": 20,
}
SHAPES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "deepseek_v2": {**_LATENT_SHAPE, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT_SHAPE, "num_hidden_layers": 3},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_group": 2,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "glm4_moe_lite": {**_LATENT_SHAPE, "num_hidden_layers": 3},
    "deepseek_v32": _INDEXED_SHAPE,
    "glm_moe_dsa": {**_INDEXED_SHAPE, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
}
"""Fields of a family in addition to SMALL."""


def make_checkpoint(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a random model of `family`, a key of FAMILIES, and return the folder.

    ``overrides`` are fields of config.json, such as num_hidden_layers=3 or rope_parameters={...}. ``max_shard_size`` is
    passed to save_pretrained. Norm scales and biases are random, too, so that omitting one is noticed.
    """
    overrides = {**SHAPES.get(family, {}), **overrides}
    saving = {"max_shard_size": overrides.pop("max_shard_size")} if "max_shard_size" in overrides else {}
    config = FAMILIES[family](**{**SMALL, **overrides})
    generator = torch.Generator().manual_seed(seed)
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    torch.random.set_rng_state(torch_state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            if name.endswith(SHARPENED[family]):
                parameter.mul_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.to(dtype).save_pretrained(folder, **saving)
    return folder
