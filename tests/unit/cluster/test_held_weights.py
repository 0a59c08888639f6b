"""The planner's weights of a rank equal those that the rank holds, in any layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.planner.model import ModelFacts, read_model
from cluster.planner.worker_memory import weights_gib
from cluster.spec.config import ParallelConfig
from cluster.spec.linear_shards import LinearShards
from cluster.spec.loader import parse_config
from cluster.spec.memory import GIB
from cluster.spec.ranks import axis_problems, positions
from cluster.spec.strategy import ShardLinear
from tests.fakes.devices import MetaDevice
from tests.fakes.loading_rank import groups_of
from tests.unit.cluster.test_gpu_memory import quantized
from workers.engine.fp8_weights import keep_fp8
from workers.models.decoder import DecoderModel
from workers.models.interface import DecoderConfig
from workers.models.registry import read_model_config
from workers.quant.fp8_matrix import Fp8Matrix

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 4608,
    "max_position_embeddings": 4096,
    "num_attention_heads": 24,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "vocab_size": 9216,
}
MIXED = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "mlp_only_layers": [0, 3],
    "moe_intermediate_size": 1152,
    "num_experts": 24,
    "num_experts_per_tok": 2,
}
SHARED = MIXED | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 2304}
LATENT = DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "moe_intermediate_size": 1152,
    "n_routed_experts": 24,
    "first_k_dense_replace": 2,
    "num_experts": 24,
}
MODELS = [
    DENSE,
    DENSE | {"tie_word_embeddings": True},
    MIXED,
    MIXED | {"mlp_only_layers": []},
    SHARED,
    LATENT,
    LATENT | {"q_lora_rank": None},
    LATENT | {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64},
]

sizes = st.integers(1, 4)
parallels = st.builds(
    ParallelConfig,
    dp=sizes,
    cp=sizes,
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2, 3, 5)),
    moe_dp=sizes,
    ep=st.sampled_from((1, 2, 3, 4, 8)),
).filter(lambda parallel: not axis_problems(parallel, "x"))


def held_bytes(
    config: DecoderConfig, parallel: ParallelConfig, global_rank: int, shards: LinearShards | None = None
) -> int:
    """Return the bytes of the matrices, in FP8 if the format is. Routers and gates are left out, because every rank has
    them in full.
    """
    groups = groups_of(parallel.model_dump(), global_rank, shards)
    with torch.device("meta"):
        model = DecoderModel(config, dtype=torch.float32, device=MetaDevice(has_kernels=True), groups=groups)
    stored = model.weights().items()
    keep_fp8(model, {name: config.weight_format.weight(name, shard.whole, "F8_E4M3") for name, shard in stored})
    held = {f"{path}.{name}": value for path, layer in model.named_modules() for name, value in vars(layer).items()}
    weights = {name: value for name, value in held.items() if isinstance(value, Fp8Matrix)}
    plain = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1}
    ignored = ("router.weight", "gate.weight")
    return sum(weight.nbytes for name, weight in (plain | weights).items() if not name.endswith(ignored))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), parallels, st.sampled_from(ShardLinear), st.sampled_from([None, 64, 128]))
def test_the_fullest_rank_holds_what_was_expected(
    folder: Path, shape: dict[str, Any], parallel: ParallelConfig, way: ShardLinear, block: int | None
) -> None:
    assume("num_experts" in shape or parallel.ep == parallel.moe_dp == 1)
    (folder / "config.json").write_text(json.dumps(shape | quantized(block)))
    prefill = f"parallel: {parallel.model_dump()}"
    if parallel.cp > 1 and way is not ShardLinear.NONE:
        prefill += f", shard_linear: {way}"
    gpu = "resources: {device: cuda, gpu_memory_gib: 80}"
    deploy = parse_config(f"model: {{path: {folder}}}\nprefill: {{{prefill}}}\n{gpu}", "f.yaml")
    facts, config = read_model(deploy), read_model_config(folder)
    assert isinstance(facts, ModelFacts)
    # No rank of a stage holds more bytes than the first.
    stages = {rank.pp: rank.global_rank for rank in reversed(positions(parallel))}
    held = max(held_bytes(config, parallel, rank, deploy.prefill.linear_shards) for rank in stages.values())
    assert weights_gib(deploy, deploy.prefill, facts) * GIB == pytest.approx(held, rel=1e-9)


def test_a_cpu_also_keeps_matrices_that_expand_latents_rearranged(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LATENT | {"dtype": "bfloat16"}))
    held = []
    for resources in ("{device: cpu}", "{device: cuda, gpu_memory_gib: 80}"):
        deploy = parse_config(f"model: {{path: {folder}}}\nresources: {resources}", "f.yaml")
        facts = read_model(deploy)
        assert isinstance(facts, ModelFacts)
        held.append(weights_gib(deploy, deploy.decode, facts) * GIB)
    layers, heads, head_size, rank = 5, 24, 128 + 128, 512
    assert held[0] - held[1] == 2 * layers * heads * head_size * rank
