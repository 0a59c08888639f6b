"""Supported model families, and readers of a model folder's configuration. Does not import torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workers.models import llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from workers.models.hf_config import HfConfig
from workers.models.interface import DecoderConfig, UnsupportedModelError

FAMILIES: Mapping[str, Callable[[HfConfig], DecoderConfig]] = {
    "LlamaForCausalLM": llama.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen2MoeForCausalLM": qwen2_moe.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
    "MixtralForCausalLM": mixtral.read,
}
"""Functions that read a family's config.json, by architecture name. They raise UnsupportedModelError."""


def read_model_config(folder: Path) -> DecoderConfig:
    """Read config.json and, for the end tokens, generation_config.json.

    Raises UnsupportedModelError if the engine cannot run the model, or the folder has no config.json.
    """
    hf = HfConfig.from_folder(folder)
    try:
        return parse_model_config(hf.raw, hf.generation)
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnsupportedModelError(f"{folder}: config.json holds a value of the wrong type: {error}") from error


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Return a model's configuration from the parsed contents of config.json and generation_config.json."""
    given = list(config.get("architectures") or [])
    family = FAMILIES.get(given[0]) if len(given) == 1 else None
    if family is None:
        raise UnsupportedModelError(f"architectures is {given!r}; allowed: {', '.join(FAMILIES)}")
    return family(HfConfig(config, generation or {}))
