"""A key that config.json lacks has the value that transformers' configuration class gives it."""

from typing import Any

import pytest

from tests.fakes.checkpoints import FAMILIES, SHAPES, SMALL
from workers.models.interface import UnsupportedModelError
from workers.models.registry import parse_model_config

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
WIDE = {"hidden_size": 1024, "num_attention_heads": 64, "num_key_value_heads": 64}
"""Heads that all default numbers of key-value heads divide."""

NEEDED = {
    "architectures",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_local_experts",
    "vocab_size",
}
"""Keys that every checkpoint has, besides the numbers and sizes of experts."""


def explicit(family: str, windows: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that gives every key, mostly with another value than the default."""
    own = {"eos_token_id": 5, "rms_norm_eps": 3e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    config = FAMILIES[family](**{**SMALL, **WIDE, **SHAPES.get(family, {}), **own, **windows})
    return {**config.to_dict(), "architectures": [ARCHITECTURES[family]]}


@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full attention", "windows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_key_has_transformers_value(family: str, windows: dict[str, Any]) -> None:
    given = explicit(family, windows)
    parse_model_config(given)
    refused: dict[str, str] = {}
    for key in given:
        lacking = {name: value for name, value in given.items() if name != key}
        try:
            ours = parse_model_config(lacking)
        except UnsupportedModelError as error:
            refused[key] = str(error)
        else:
            theirs = FAMILIES[family].from_dict(lacking).to_dict().get(key)
            assert ours == parse_model_config({**lacking, key: theirs}), key
    assert set(refused) <= NEEDED | set(SHAPES.get(family, {}))
    for key, message in refused.items():
        assert key.replace("local_", "") in message.replace("local_", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_rope_theta_has_transformers_value(family: str) -> None:
    given = explicit(family, {}) | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    theirs = FAMILIES[family].from_dict(given).rope_parameters
    assert parse_model_config(given).rope.theta == theirs["rope_theta"]
