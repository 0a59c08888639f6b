"""Frequencies, angles and scales of every RoPE variant equal transformers' rotary module bit for bit."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from workers.layers import rotary
from workers.layers.rotary import RotaryEmbedding
from workers.models.hf_config import read_rope_config
from workers.models.interface import UnsupportedModelError

HEAD_DIM, MAX_LEN = 64, 2048

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "large-base": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-given-scale": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn-null-truncate": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "truncate": None,
    },
}


def transformers_rotary(parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=MAX_LEN,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)


def our_rotary(parameters: dict[str, Any]) -> RotaryEmbedding:
    rope = read_rope_config({"rope_parameters": parameters}, MAX_LEN)
    return RotaryEmbedding(rope, HEAD_DIM, torch.device("cpu"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_makes_nothing_on_the_host(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU could not copy it during capture."""
    ours = our_rotary(VARIANTS[variant])
    monkeypatch.setattr(rotary, "_exponents", lambda _: pytest.fail("made in a step"))
    ours(torch.arange(2 * MAX_LEN), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rotation_equals_transformers(variant: str, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 2, 77, 255, 256, 1000, MAX_LEN - 1])
    x = torch.randn(len(positions), 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)

    cos, sin = transformers_rotary(VARIANTS[variant])(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    rotated = our_rotary(VARIANTS[variant])(positions, dtype).apply(x)

    assert torch.equal(rotated, expected[0].transpose(0, 1))


def test_dynamic_decode_steps_beyond_the_original_length_equal_transformers() -> None:
    theirs, ours = transformers_rotary(VARIANTS["dynamic"]), our_rotary(VARIANTS["dynamic"])
    for position in (MAX_LEN - 1, MAX_LEN, MAX_LEN + 1, 3 * MAX_LEN):
        cos, sin = theirs(torch.zeros(1), torch.tensor([[position]]))
        rotation = ours(torch.tensor([position]), torch.float32)
        torch.testing.assert_close(rotation.cos[:, 0], cos[0], atol=2e-3, rtol=0)
        torch.testing.assert_close(rotation.sin[:, 0], sin[0], atol=2e-3, rtol=0)


def test_dynamic_rotation_depends_only_on_the_position() -> None:
    ours = our_rotary(VARIANTS["dynamic"])
    positions = torch.tensor([5, MAX_LEN, 2 * MAX_LEN, 3 * MAX_LEN])
    together = ours(positions, torch.float32)
    for index in range(len(positions)):
        alone = ours(positions[index : index + 1], torch.float32)
        assert torch.equal(alone.cos[0], together.cos[index])


@pytest.mark.parametrize("variant", VARIANTS)
def test_old_config_form_means_the_same(variant: str) -> None:
    parameters = VARIANTS[variant]
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type")}
    for type_key in ("type", "rope_type"):
        old = {"rope_theta": parameters["rope_theta"], "rope_scaling": {type_key: parameters["rope_type"], **scaling}}
        assert read_rope_config(old, MAX_LEN) == read_rope_config({"rope_parameters": parameters}, MAX_LEN)


def test_nothing_given_is_the_default() -> None:
    rope = read_rope_config({"rope_scaling": None}, MAX_LEN)
    assert (rope.rope_type, rope.theta, rope.factor) == ("default", 10_000.0, 1.0)


def test_yarn_without_factor_takes_the_ratio_of_lengths() -> None:
    given = {"rope_type": "yarn", "original_max_position_embeddings": 512}
    assert read_rope_config({"rope_parameters": given}, MAX_LEN).factor == MAX_LEN / 512


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            ["'longrope'", "default, linear, dynamic, llama3, yarn"],
        ),
        ({"rope_scaling": {"type": "linear"}}, ["'linear'", "factor"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "high_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["flat", "full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_theta": 1}, ["rope_theta", "above 1", "1"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, ["factor", "above 0", "0"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": "1.0"}}, ["mscale", "'1.0'"]),
        (
            {"original_max_position_embeddings": -5, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            ["original_max_position_embeddings", "-5"],
        ),
    ],
)
def test_unsupported_settings_are_refused_with_a_reason(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_rope_config(raw, MAX_LEN)
    assert all(word in str(caught.value) for word in words)
