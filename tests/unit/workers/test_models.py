"""The decoder compared with transformers: weights and config from the same folder, attention from a dense fake."""

import json
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.spec.kv import KvGroup, KvPart
from tests.fakes.checkpoints import DENSE, FAMILIES, make_checkpoint
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.generation import generate
from tests.fakes.stable_ties import break_ties_by_position
from tests.unit.workers.test_rotary import VARIANTS
from workers.engine.weights import load_model
from workers.models.decoder import DecoderModel
from workers.models.interface import UnsupportedModelError
from workers.models.registry import parse_model_config, read_model_config

PROMPT = torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(1))

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
GLM4_MOE = {"architectures": ["Glm4MoeForCausalLM"]}
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
WINDOWS = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

Pair = tuple[DecoderModel, PreTrainedModel]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Return our model and transformers' for one random checkpoint. Equal arguments share it."""

    @cache
    def make(family: str, dtype: torch.dtype = torch.float32, rope: str | None = None, **overrides: Any) -> Pair:
        parameters: dict[str, Any] = {"rope_parameters": dict(VARIANTS[rope])} if rope else {}
        overrides = {key: list(value) if isinstance(value, tuple) else value for key, value in overrides.items()}
        folder = make_checkpoint(tmp_path_factory.mktemp(family), family, dtype=dtype, **overrides, **parameters)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        break_ties_by_position(theirs)
        return load_model(folder), theirs

    return make


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def our_logits(
    model: DecoderModel, token_ids: Tensor, chunk_lens: list[int] | None = None, *, kv_first: bool = False
) -> Tensor:
    context, start, rows = DenseAttention(kv_first=kv_first), 0, []
    for chunk_len in chunk_lens or [len(token_ids)]:
        positions = torch.arange(start, start + chunk_len)
        rows.append(model.logits(model(token_ids[start : start + chunk_len], positions, context)))
        start += chunk_len
    assert start == len(token_ids)
    return torch.cat(rows)


def assert_same_logits(pair: Pair, token_ids: Tensor, atol: float = 1e-4) -> None:
    ours, theirs = our_logits(pair[0], token_ids), pair[1](token_ids[None]).logits[0].float()
    assert theirs.std() > 1, "logits must be spread for this comparison to mean anything"
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_projected_after_keys_and_values_give_the_same_logits(
    pair_of: Callable[..., Pair], family: str
) -> None:
    model = pair_of(family)[0]
    torch.testing.assert_close(our_logits(model, PROMPT, kv_first=True), our_logits(model, PROMPT), atol=1e-5, rtol=0)


@pytest.mark.parametrize("wanted", [[len(PROMPT) - 1], [40, 3], []], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_skips_unwanted_tokens(pair_of: Callable[..., Pair], family: str, wanted: list[int]) -> None:
    model, rows = pair_of(family)[0], torch.tensor(wanted, dtype=torch.int64)
    positions = torch.arange(len(PROMPT))
    whole = model(PROMPT, positions, DenseAttention())
    narrowed = model(PROMPT, positions, DenseAttention(query_rows=rows))
    assert narrowed.shape == (len(wanted), whole.shape[1])
    torch.testing.assert_close(narrowed, whole[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(pair_of: Callable[..., Pair], family: str, tied: bool) -> None:
    assert_same_logits(pair_of(family, tie_word_embeddings=tied), PROMPT)


@pytest.mark.parametrize("rope", ["linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_variants_equal_transformers(pair_of: Callable[..., Pair], family: str, rope: str) -> None:
    assert_same_logits(pair_of(family, rope=rope), PROMPT)


@pytest.mark.parametrize(
    ("family", "flags"),
    [("llama", {"attention_bias": True}), ("llama", {"mlp_bias": True}), ("qwen3", {"attention_bias": True})],
)
def test_optional_biases_equal_transformers(pair_of: Callable[..., Pair], family: str, flags: dict[str, bool]) -> None:
    assert_same_logits(pair_of(family, **flags), PROMPT)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"mlp_only_layers": (1,)}),
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
        ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 5}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen2_moe", {"mlp_only_layers": (0,), "qkv_bias": False}),
        ("qwen2_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 7}),
    ],
    ids=str,
)
def test_shapes_of_experts_equal_transformers(pair_of: Callable[..., Pair], family: str, shape: dict[str, Any]) -> None:
    assert_same_logits(pair_of(family, **shape), PROMPT)


@pytest.mark.parametrize("rope", [None, "yarn"])
@pytest.mark.parametrize("share", [1.0, 0.25, 0.125])
def test_heads_of_which_a_part_is_rotated_equal_transformers(
    pair_of: Callable[..., Pair], share: float, rope: str | None
) -> None:
    shape = {"use_qk_norm": False, "attention_bias": False}
    assert_same_logits(pair_of("glm4_moe", rope=rope, partial_rotary_factor=share, **shape), PROMPT)


@pytest.mark.parametrize(
    "shape",
    [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"num_hidden_layers": 3, "head_dim": 32}],
    ids=str,
)
def test_shapes_equal_transformers(pair_of: Callable[..., Pair], shape: dict[str, int]) -> None:
    assert_same_logits(pair_of("qwen3", **shape), PROMPT)


@pytest.mark.parametrize("family", DENSE)
def test_bfloat16_is_close_to_transformers(pair_of: Callable[..., Pair], family: str) -> None:
    ours, theirs = pair_of(family, dtype=torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    assert our_logits(ours, PROMPT).dtype == torch.float32
    difference = (our_logits(ours, PROMPT) - theirs(PROMPT[None]).logits[0].float()).abs()
    assert difference.mean() < 0.02
    assert difference.max() < 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(pair_of: Callable[..., Pair], family: str) -> None:
    ours, theirs = pair_of(family)
    expected = generate(theirs, PROMPT[:40], 32)
    assert len(set(expected[40:].tolist())) > 8, "the answer must not be a loop"
    assert torch.equal(our_logits(ours, expected[:-1])[39:].argmax(-1), expected[40:])


def test_chunks_change_nothing(pair_of: Callable[..., Pair]) -> None:
    model, _ = pair_of("qwen2")
    whole = our_logits(model, PROMPT)
    torch.testing.assert_close(our_logits(model, PROMPT, [1, 40, 0, 54, 1]), whole, atol=1e-5, rtol=0)


def test_no_tokens_still_reach_every_layer(pair_of: Callable[..., Pair]) -> None:
    model, context = pair_of("qwen3")[0], DenseAttention()
    nothing = torch.empty(0, dtype=torch.int64)
    assert model(nothing, nothing, context).shape == (0, 64)
    assert context.calls == [("put", 0), ("attend", 0), ("put", 1), ("attend", 1)]
    assert model.logits(torch.empty(0, 64)).shape == (0, 256)


def test_dynamic_rope_answers_beyond_the_original_length_equal_generate(pair_of: Callable[..., Pair]) -> None:
    ours, theirs = pair_of("llama", rope="dynamic", max_position_embeddings=48)
    expected = generate(theirs, PROMPT[:40], 40)
    tokens = our_logits(ours, expected[:-1])[39:].argmax(-1)
    assert torch.equal(tokens, expected[40:])


def test_dynamic_rope_prompts_beyond_the_original_length_are_chunk_independent(pair_of: Callable[..., Pair]) -> None:
    """A paged engine must differ from transformers here, which rotates the whole prompt by its final length."""
    ours, theirs = pair_of("llama", rope="dynamic", max_position_embeddings=49)
    whole = our_logits(ours, PROMPT)
    torch.testing.assert_close(our_logits(ours, PROMPT, [30, 30, 36]), whole, atol=1e-5, rtol=0)
    assert not torch.allclose(whole, theirs(PROMPT[None]).logits[0], atol=1e-2)


@pytest.fixture
def raw_config() -> dict[str, Any]:
    """Return the smallest valid config.json."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", "LlamaForCausalLM"]),
        ({**MIXTRAL, "sliding_window": 0}, ["sliding_window", "positive", "0"]),
        ({**MIXTRAL, "num_experts_per_tok": 5}, ["num_experts_per_tok is 5", "at most 4"]),
        ({**QWEN2_MOE, "num_experts_per_tok": 5}, ["num_experts_per_tok is 5", "at most 4"]),
        ({**QWEN2_MOE, "shared_expert_intermediate_size": 0}, ["shared_expert_intermediate_size", "positive", "0"]),
        ({**GLM4_MOE, "partial_rotary_factor": 0}, ["partial_rotary_factor is 0", "head_dim = 16", "even"]),
        ({**GLM4_MOE, "partial_rotary_factor": 0.3}, ["partial_rotary_factor is 0.3", "head_dim = 16", "even"]),
        ({**GLM4_MOE, "rope_parameters": {"partial_rotary_factor": "half"}}, ["partial_rotary_factor is 'half'"]),
        ({**GLM4_MOE, "n_group": 3}, ["n_group is 3", "n_routed_experts = 128"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5", "allowed: 1.0"]),
        ({"architectures": None}, ["architectures", "Qwen3ForCausalLM"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers is 1000000000", "at most 4096"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quant_method is 'awq'", "allowed: 'fp8'"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"is_causal": False}, ["is_causal is False", "allowed: True"]),
        ({"is_causal": None}, ["is_causal is None", "allowed: True"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention", "sliding_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types has 1 entries", "allowed: 2, one for each layer"]),
        ({"use_sliding_window": True, "sliding_window": "8"}, ["sliding_window", "'8'"]),
        ({"rope_scaling": {"type": "su", "factor": 2}}, ["'su'", "yarn"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"vocab_size": None}, ["vocab_size", "None"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers", "'two'"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "float32, bfloat16, float16"]),
    ],
)
def test_unsupported_configs_are_refused_with_a_reason(
    raw_config: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse_model_config({**raw_config, **changes})
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None, None)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8)),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, (4096, None)),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, (None, None)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, (None, None)),
        ({**MIXTRAL, "sliding_window": 8}, (8, 8)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None)),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            (None, 4096),
        ),
        ({**QWEN2_MOE, "use_sliding_window": True}, (4096, None)),
        ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2}, (8, 8)),
        ({**QWEN3_MOE, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, (None, None)),
    ],
)
def test_windows_equal_transformers(
    raw_config: dict[str, Any], changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = parse_model_config({**raw_config, **changes})
    assert config.windows == windows
    layers = {group.window: group.layers for group in config.kv_groups("float32")}
    assert layers == {window: tuple(at for at in (0, 1) if windows[at] == window) for window in windows}


def test_kv_groups_cover_the_whole_model(raw_config: dict[str, Any]) -> None:
    for family in (raw_config, raw_config | QWEN2_MOE, raw_config | MIXTRAL):
        parts = (KvPart(name="k", dim=16, dtype="bfloat16"), KvPart(name="v", dim=16, dtype="bfloat16"))
        group = KvGroup(name="full_attention", num_heads=2, layers=(0, 1), parts=parts)
        assert parse_model_config(family).kv_groups("bfloat16") == (group,)


@pytest.mark.parametrize(
    ("changes", "dtype", "expected"),
    [
        (
            WINDOWS,
            "bfloat16",
            (3, 61_440, 8192, 256, 128, 128, 256, 0, 256, ((8, 2),), None, 0, 0, 1.0, 0, 0, 0.0, None),
        ),
        (
            MIXTRAL | {"num_key_value_heads": 1},
            "bfloat16",
            (2, 94_208, 4096, 256, 64, 128, 256, 0, 256, (), None, 0, 0, 1.0, 0, 73_728, 1.0, None),
        ),
        (
            QWEN2_MOE | {"mlp_only_layers": [0]},
            "float32",
            (2, 69_120, 8192, 256, 256, 256, 256, 0, 256, (), None, 0, 0, 1.0, 0, 18_432, 0.5, None),
        ),
    ],
)
def test_cost_is_that_of_an_average_layer(
    raw_config: dict[str, Any], changes: dict[str, Any], dtype: str, expected: tuple[object, ...]
) -> None:
    assert astuple(parse_model_config(raw_config | changes).cost(dtype)) == expected


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")])
def test_dtype_is_read_in_both_forms(raw_config: dict[str, Any], key: str, value: str) -> None:
    assert parse_model_config(raw_config).dtype == "float32"
    assert parse_model_config({**raw_config, key: value}).dtype == "bfloat16"


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not valid JSON"):
        read_model_config(tmp_path)


def test_a_value_that_breaks_arithmetic_is_refused(tmp_path: Path, raw_config: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 0.5}
    (tmp_path / "config.json").write_text(json.dumps({**raw_config, "rope_parameters": rope}))
    with pytest.raises(UnsupportedModelError, match="cannot be used: division by zero"):
        read_model_config(tmp_path)
