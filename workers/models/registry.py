"""Supported model families, and readers of a model folder's configuration. Does not import torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from workers.models import deepseek, glm4_moe, glm_moe_dsa, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from workers.models.hf_config import HfConfig, read_config
from workers.models.interface import DecoderConfig, UnsupportedModelError


class Family(NamedTuple):
    """Model family, which reads its own config.json."""

    read: Callable[[HfConfig], DecoderConfig]
    """Raises UnsupportedModelError if the engine cannot run the model."""
    defaults: Mapping[str, Any]
    """Values of missing keys, as in transformers."""


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(llama.read, llama.DEFAULTS),
    "MistralForCausalLM": Family(mistral.read, mistral.DEFAULTS),
    "Qwen2ForCausalLM": Family(qwen2.read, qwen2.DEFAULTS),
    "Qwen3ForCausalLM": Family(qwen3.read, qwen3.DEFAULTS),
    "Qwen2MoeForCausalLM": Family(qwen2_moe.read, qwen2_moe.DEFAULTS),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.read, qwen3_moe.DEFAULTS),
    "MixtralForCausalLM": Family(mixtral.read, mixtral.DEFAULTS),
    "DeepseekV2ForCausalLM": Family(deepseek.read_v2, deepseek.V2_DEFAULTS),
    "DeepseekV3ForCausalLM": Family(deepseek.read_v3, deepseek.V3_DEFAULTS),
    "DeepseekV32ForCausalLM": Family(deepseek.read_v32, deepseek.V32_DEFAULTS),
    "Glm4MoeForCausalLM": Family(glm4_moe.read, glm4_moe.DEFAULTS),
    "Glm4MoeLiteForCausalLM": Family(glm4_moe.read_flash, glm4_moe.FLASH_DEFAULTS),
    "GlmMoeDsaForCausalLM": Family(glm_moe_dsa.read, glm_moe_dsa.DEFAULTS),
}
"""Families by architecture name."""


def read_model_config(folder: Path) -> DecoderConfig:
    """Read config.json. Raises UnsupportedModelError if it is missing, or the engine cannot run the model."""
    config = read_config(folder)
    try:
        return parse_model_config(config)
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UnsupportedModelError(f"{folder}: config.json holds a value that cannot be used: {error}") from error


def parse_model_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Return a model's configuration from the parsed contents of config.json."""
    given = list(config.get("architectures") or [])
    family = FAMILIES.get(given[0]) if len(given) == 1 else None
    if family is None:
        raise UnsupportedModelError(f"architectures is {given!r}; allowed: {', '.join(FAMILIES)}")
    return family.read(HfConfig({**family.defaults, **config}))
