"""The context length of a model is the same for the router and for workers."""

from pathlib import Path
from typing import Any

import pytest

from cluster.spec.context import model_context
from cluster.tokenizer import Tokenizer
from tests.fakes.model_folder import write_json, write_model_folder
from workers.models.registry import parse_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40960,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 40960),
        ({"rope_scaling": None}, 40960),
        ({"rope_scaling": YARN}, 131072),
        ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 4096}}, 40960),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 40960),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 40960),
        ({"rope_scaling": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, 40960),
    ],
)
def test_yarn_stretches_the_context(tmp_path: Path, fields: dict[str, Any], expected: int) -> None:
    config = LLAMA | fields
    assert model_context(config) == expected
    assert parse_model_config(config).max_position_embeddings == expected
    write_json(write_model_folder(tmp_path) / "config.json", config)
    assert Tokenizer(tmp_path).max_context == expected


def test_a_model_may_not_say() -> None:
    assert model_context({}) is None
