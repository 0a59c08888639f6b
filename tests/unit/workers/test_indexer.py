"""Models with indexers: logits compared with transformers', costs, KV groups, and checkpoints that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.spec.kv import INDEXED_ATTENTION
from tests.fakes.checkpoints import INDEXED, SHAPES, make_checkpoint
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.fp8_checkpoints import edit_config
from tests.fakes.stable_ties import break_ties_by_position
from workers.engine.weights import check_weights, load_model
from workers.layers.attention import AttentionWork
from workers.layers.latent_attention import LatentAttention
from workers.models.interface import DecoderConfig, UnsupportedModelError
from workers.models.registry import parse_model_config, read_model_config

PROMPT = torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(1))
LARGE: dict[str, Any] = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 163_840,
    "index_topk": 2048,
}
"""DeepSeek-V3.2's sizes."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one head": ("deepseek_v32", {"index_n_heads": 1}),
    "no part without positions": ("deepseek_v32", {"index_head_dim": 8}),
    "as wide as latents": ("deepseek_v32", {"index_head_dim": 24}),
    "one key": ("deepseek_v32", {"index_topk": 1}),
    "biases": ("deepseek_v32", {"attention_bias": True}),
    "layers by type": ("deepseek_v32", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "all shared but one": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared", "shared"]}),
    "none shared": ("glm_moe_dsa", {"indexer_types": ["full"] * 4}),
    "by frequency": ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 2}),
    "by letters": ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FSSF"}),
}


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def parsed(kind: str, changes: dict[str, Any]) -> DecoderConfig:
    return parse_model_config({"architectures": [f"{kind}ForCausalLM"], **changes})


def transformers_logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    break_ties_by_position(model)
    logits: Tensor = model(PROMPT[None]).logits[0]
    assert logits.std() > 1, "logits must be spread for this comparison to mean anything"
    return logits


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, family, **changes)
    model, context = load_model(folder), DenseAttention(query_rows=torch.tensor([0, 40, 95]))
    logits = model.logits(model(PROMPT, torch.arange(len(PROMPT)), context))
    torch.testing.assert_close(logits, transformers_logits(folder)[[0, 40, 95]], atol=1e-4, rtol=0)
    assert {call for call, _ in context.calls} == {"put", "select"}


@pytest.mark.parametrize("family", INDEXED)
def test_layers_use_all_keys_until_a_query_sees_more_than_it_may_use(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    model, context = load_model(folder), DenseAttention(work=AttentionWork(8, 8, 36))
    most = SHAPES[family]["index_topk"]
    first = model.logits(model(PROMPT[:most], torch.arange(most), context))
    assert {call for call, _ in context.calls} == {"put", "expand"}
    context.calls.clear()
    rest = model.logits(model(PROMPT[most:], torch.arange(most, len(PROMPT)), context))
    assert {call for call, _ in context.calls} == {"put", "select"}
    torch.testing.assert_close(torch.cat((first, rest)), transformers_logits(folder), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "shares", [{"index_topk_pattern": "FSSF"}, {"index_topk_freq": 2, "index_skip_topk_offset": 1}], ids=str
)
def test_indexers_of_layers_that_share_a_selection_are_ignored(tmp_path: Path, shares: dict[str, Any]) -> None:
    """config.json can be edited so that layers share selections for which the checkpoint has indexers."""
    folder = make_checkpoint(tmp_path, "glm_moe_dsa", indexer_types=["full"] * 4)
    edit_config(folder, indexer_types=None, **shares)
    check_weights(folder)
    model = load_model(folder)
    assert sum(model.config.shares_selection) == 2
    logits = model.logits(model(PROMPT, torch.arange(len(PROMPT)), DenseAttention()))
    torch.testing.assert_close(logits, transformers_logits(folder), atol=1e-4, rtol=0)


def test_weights_of_heads_are_kept_in_fp32(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v32")
    layer = load_model(folder, dtype=torch.bfloat16).layers["1"].self_attn
    assert isinstance(layer, LatentAttention)
    assert layer.indexer is not None
    stored = load_file(folder / "model.safetensors")["model.layers.1.self_attn.indexer.weights_proj.weight"]
    weight = layer.indexer.weights_proj.weight
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, stored)
    assert layer.indexer.k_norm.weight.dtype == torch.bfloat16


def test_only_layers_with_an_indexer_store_its_keys(tmp_path: Path) -> None:
    indexed, plain = read_model_config(make_checkpoint(tmp_path, "glm_moe_dsa")).kv_groups("bfloat16")
    assert (indexed.name, indexed.layers, plain.layers) == (INDEXED_ATTENTION, (0, 2), (1, 3))
    assert [(part.name, part.dim) for part in indexed.parts] == [("latent", 24), ("index", 20)]
    assert [(part.name, part.dim) for part in plain.parts] == [("latent", 24)]


def test_costs_of_deepseek_v32() -> None:
    config, dense = parsed("DeepseekV32", LARGE), parsed("DeepseekV3", LARGE)

    def num_weights(config: DecoderConfig) -> int:
        return sum(cost.queries + cost.kv + cost.whole + cost.dense + cost.experts for cost in config.layer_costs)

    assert num_weights(config) - num_weights(dense) == 61 * (7168 * 128 + 1536 * 64 * 128 + 7168 * 64)
    assert sum(group.bytes_per_token for group in config.kv_groups("bfloat16")) == 61 * (576 + 128) * 2
    cost = config.cost("bfloat16")
    assert (cost.top_k, cost.index_flops, cost.stored_pair_flops) == (2048, 2 * 64 * 129, 2 * 128 * 1088)
    assert (cost.q_row_bytes, cost.partial_row_bytes) == (128 * 576 * 2, 128 * 512 * 4)
    assert cost.kv_row_bytes == (576 + 128) * 2


def test_layers_that_share_a_selection_cost_no_indexer() -> None:
    types = ["full", "shared", "shared", "shared"]
    sizes = LARGE | {"num_hidden_layers": 4, "num_attention_heads": 64, "indexer_types": types}
    full, *shared = parsed("GlmMoeDsa", sizes).layer_costs
    assert full.kv - shared[0].kv == 7168 * 128
    assert full.whole - shared[0].whole == 2048 * 32 * 128 + 7168 * 32
    assert [cost.index_flops for cost in shared] == [0, 0, 0]
    assert parsed("GlmMoeDsa", sizes).cost("bfloat16").index_flops == 2 * 32 * 129 // 4
    attending = full.forms[-1].activations[-1]
    queries_and_key = 32 * 128 + 128 + 2 * 32
    assert attending.num_bytes > 0
    assert attending.whole_width == queries_and_key
    assert [cost.forms[-1].activations[-1] for cost in shared] == [attending._replace(whole_width=0)] * 3


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("DeepseekV32", {"index_topk": None}, "index_topk as a positive integer, but gives None"),
        ("DeepseekV32", {"index_topk": 0}, "index_topk as a positive integer, but gives 0"),
        ("DeepseekV32", {"index_n_heads": "4"}, "index_n_heads as a positive integer, but gives '4'"),
        ("DeepseekV32", {"index_head_dim": 32}, "index_head_dim is 32; allowed: at least qk_rope_head_dim = 64"),
        ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank as a positive integer"),
        ("DeepseekV32", {"rope_interleave": False}, "rope_interleave is False; allowed: True"),
        ("DeepseekV32", {"indexer_rope_interleave": True}, "indexer_rope_interleave is True; allowed: False"),
        ("DeepseekV32", {"routed_scaling_factor": None}, "routed_scaling_factor as a number, but gives None"),
        ("DeepseekV32", {"rms_norm_eps": float("nan")}, "rms_norm_eps as a number, but gives nan"),
        ("DeepseekV32", {"moe_layer_freq": 2}, "moe_layer_freq is 2; allowed: 1"),
        ("DeepseekV32", {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None; allowed"),
        ("DeepseekV32", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries; allowed: 61"),
        ("DeepseekV32", {"mlp_layer_types": ["linear"] * 61}, "mlp_layer_types has linear; allowed: dense or sparse"),
        ("GlmMoeDsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave is False; allowed: True"),
        ("GlmMoeDsa", {"indexer_types": ["full"] * 60 + ["half"]}, "indexer_types has half; allowed: full or shared"),
        ("GlmMoeDsa", {"index_topk_pattern": "F" * 60 + "X"}, "indexer_types has X; allowed: full or shared"),
        ("GlmMoeDsa", {"indexer_types": ["full"]}, "indexer_types has 1 entries; allowed: 61, one for each layer"),
        ("GlmMoeDsa", {"indexer_types": ["shared"] * 61}, "indexer_types begins with shared; allowed: full"),
        ("GlmMoeDsa", {"indexer_types": 2}, "indexer_types is 2; allowed: a list of full or shared"),
        ("GlmMoeDsa", {"index_topk_pattern": 2}, "indexer_types is 2; allowed: a list of full or shared"),
        ("GlmMoeDsa", {"index_topk_pattern": [["F"]] * 61}, "indexer_types has .'F'.; allowed: full or shared"),
        ("DeepseekV32", {"mlp_layer_types": "dense"}, "mlp_layer_types is 'dense'; allowed: a list of dense or sparse"),
        ("GlmMoeDsa", {"index_topk": True}, "index_topk as a positive integer, but gives True"),
    ],
)
def test_other_variants_are_refused(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        parsed(kind, LARGE | changes)
