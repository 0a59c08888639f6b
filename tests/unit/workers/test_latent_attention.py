"""Latent attention and the router of DeepSeek models compared with transformers, in both forms of attention."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.fakes.checkpoints import LATENT, make_checkpoint
from tests.fakes.dense_attention import DenseAttention
from tests.unit.workers.test_rotary import VARIANTS
from workers.device import CPU
from workers.engine.checkpoint_files import CheckpointError
from workers.engine.weights import check_weights, load_model
from workers.layers.attention import AttentionWork
from workers.layers.feed_forward import MoeBlock
from workers.layers.latent_attention import LatentAttention
from workers.models.decoder import DecoderModel
from workers.models.interface import UnsupportedModelError
from workers.models.registry import parse_model_config, read_model_config

PROMPT = torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(1))
EXTEND, DECODE = AttentionWork(num_queries=96, num_keys=96, num_pairs=4656), AttentionWork(1, 96, 96)
"""Steps for which keys are expanded, and used as stored."""
VARIANTS_OF_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 greedy": ("deepseek_v2", {"topk_method": "greedy"}),
    "v2 lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "v2 with biases": ("deepseek_v2", {"attention_bias": True}),
    "v2 without shared experts' own width": ("deepseek_v2", {"n_shared_experts": 1}),
    "v2 without shared experts": ("deepseek_v2", {"n_shared_experts": 0}),
    "v3 without shared experts": ("deepseek_v3", {"n_shared_experts": 0}),
    "v3 in halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3 of one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8}),
    "v3 not renormalized": ("deepseek_v3", {"norm_topk_prob": False}),
    "v3 dense": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "v3 with biases": ("deepseek_v3", {"attention_bias": True}),
    "v2 yarn": ("deepseek_v2", {"rope_parameters": VARIANTS["yarn-mscale"]}),
    "v3 yarn": ("deepseek_v3", {"rope_parameters": VARIANTS["yarn-mscale"] | {"mscale": 0.7, "mscale_all_dim": 1.2}}),
    "v3 yarn at one scale": ("deepseek_v3", {"rope_parameters": VARIANTS["yarn-mscale"] | {"mscale": None}}),
}


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a random model, given its family."""
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp(family), family))


def logits_of(model: DecoderModel, work: AttentionWork) -> tuple[Tensor, set[str]]:
    """Return the prompt's logits, and the calls made to the context."""
    context = DenseAttention(work=work)
    logits = model.logits(model(PROMPT, torch.arange(len(PROMPT)), context))
    return logits, {call for call, _ in context.calls}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("family", "changes"), VARIANTS_OF_MODELS.values(), ids=VARIANTS_OF_MODELS.keys())
def test_both_forms_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, family, **changes)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(PROMPT[None]).logits[0]
    assert expected.std() > 1, "logits must be spread for this comparison to mean anything"
    model = load_model(folder)
    for work, call in ((EXTEND, "expand"), (DECODE, "attend")):
        logits, calls = logits_of(model, work)
        assert calls == {"put", call}
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "is_expanded"),
    [(1, 1, True), (1, 2, False), (160, 100_160, False), (190, 100_190, True), (8192, 131_072, True)],
)
def test_the_form_with_fewer_flops_is_chosen(num_queries: int, num_keys: int, is_expanded: bool) -> None:
    """DeepSeek-V3's sizes: expanding a key takes as many FLOPs as 341 / 2 pairs save."""
    raw = {"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config = parse_model_config(
        {**raw, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 1 << 17}
    )
    layer = DecoderModel(config, dtype=torch.float32, device=CPU).layers["0"].self_attn
    assert isinstance(layer, LatentAttention)
    pairs = num_queries * (num_keys - num_queries) + num_queries * (num_queries + 1) // 2
    assert layer._expands(AttentionWork(num_queries, num_keys, pairs)) is is_expanded


def test_values_of_one_element_per_head_are_adjacent(tmp_path: Path) -> None:
    """Native products read rows without gaps."""
    layer = load_model(make_checkpoint(tmp_path, "deepseek_v3", v_head_dim=1)).layers["0"].self_attn
    assert isinstance(layer, LatentAttention)
    assert layer.kv_b.values(torch.ones(5, 4, 16)).flatten(1).stride() == (4, 1)


def test_the_router_keeps_its_correction_in_fp32(folder_of: Any) -> None:
    folder = folder_of("deepseek_v3")
    model, stored = load_model(folder, dtype=torch.bfloat16), load_file(folder / "model.safetensors")
    block = model.layers["2"].mlp
    assert isinstance(block, MoeBlock)
    bias = block.router.e_score_correction_bias
    assert bias is not None
    assert torch.equal(bias, stored["model.layers.2.mlp.gate.e_score_correction_bias"])
    assert block.router.get_parameter("weight").dtype == torch.bfloat16


def test_draft_layers_of_a_checkpoint_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    check_weights(folder)
    save_file({**stored, "model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight"):
        check_weights(folder)


def test_a_token_is_stored_once_for_all_heads(folder_of: Any) -> None:
    for family in LATENT:
        (group,) = read_model_config(folder_of(family)).kv_groups("bfloat16")
        assert (group.num_heads, [(part.name, part.dim) for part in group.parts]) == (1, [("latent", 24)])


def test_costs_add_up_to_the_published_sizes_of_deepseek_v3() -> None:
    raw = {"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280, "hidden_size": 7168}
    sizes = {"intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128}
    config = parse_model_config({**raw, **sizes, "max_position_embeddings": 163_840})
    tables, layers = 2 * 129_280 * 7168, config.layer_costs
    stored = sum(cost.queries + cost.kv + cost.whole + cost.dense + cost.experts for cost in layers)
    used = sum(cost.used for cost in layers)
    assert (tables + stored) / 1e9 == pytest.approx(671, abs=0.3)
    assert (tables + used) / 1e9 == pytest.approx(37.5, abs=0.3)
    cost = config.cost("bfloat16")
    assert sum(group.bytes_per_token for group in config.kv_groups("bfloat16")) == 61 * 576 * 2
    assert cost.kv_row_bytes == 576 * 2
    # Per head and pair: 192 + 128 products with expanded keys, 576 + 512 with stored ones.
    assert (cost.attention_flops, cost.stored_pair_flops) == (2 * 128 * 320, 2 * 128 * 1088)
    assert cost.expand_flops == 2 * 512 * 128 * 256


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("V2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; allowed: 'greedy' or 'group_limited_greedy'"),
        ("V2", {"norm_topk_prob": True}, "norm_topk_prob is True; allowed: False"),
        ("V2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; allowed: 'softmax'"),
        ("V2", {"mlp_bias": True}, "mlp_bias is True; allowed: False"),
        ("V2", {"q_lora_rank": None, "attention_bias": True}, "attention_bias is true with a null q_lora_rank"),
        ("V3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; allowed: 'sigmoid'"),
        ("V3", {"topk_method": "greedy"}, "topk_method is 'greedy'; allowed: 'noaux_tc'"),
        ("V3", {"n_group": 3}, "n_group is 3; allowed: a divisor of n_routed_experts = 256"),
        ("V3", {"n_group": 256}, "n_group is 256; allowed: .* with at least 2 experts per group"),
        ("V3", {"topk_group": 9}, "topk_group is 9; allowed: at most n_group = 8"),
        ("V3", {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok is 33; allowed: at most 32"),
        ("V3", {"n_group": None}, "config.json must give n_group as a positive integer"),
        ("V3", {"first_k_dense_replace": -1}, "first_k_dense_replace as an integer of at least 0"),
        ("V3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; allowed: even numbers"),
        ("V3", {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None; allowed"),
    ],
)
def test_other_variants_are_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    raw = {**sizes, "num_attention_heads": 1, "max_position_embeddings": 8, "num_experts_per_tok": 2}
    with pytest.raises(UnsupportedModelError, match=reason):
        parse_model_config({"architectures": [f"Deepseek{family}ForCausalLM"], **raw, **changes})


def test_experts_are_in_every_nth_layer_after_the_dense_ones() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6}
    raw = {**sizes, "num_attention_heads": 1, "max_position_embeddings": 8}
    changes = {"architectures": ["DeepseekV3ForCausalLM"], "moe_layer_freq": 2, "first_k_dense_replace": 1}
    costs = parse_model_config({**raw, **changes}).layer_costs
    assert [cost.experts_per_token for cost in costs] == [0, 0, 8, 0, 8, 0]
