"""Weights that the planner expects of a worker, compared with those that the ranks' models have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.planner.model import ModelFacts, read_model
from cluster.planner.weights import weights_gib
from cluster.spec.config import ParallelConfig
from cluster.spec.loader import parse_config
from cluster.spec.pool import GIB
from cluster.spec.ranks import axis_problems, positions
from tests.fakes.loading_rank import groups_of
from workers.models.decoder import DecoderModel
from workers.models.interface import DecoderConfig
from workers.models.registry import read_model_config

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
MODELS = [DENSE, DENSE | {"tie_word_embeddings": True}, MIXED, MIXED | {"mlp_only_layers": []}, SHARED]

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


def held_bytes(config: DecoderConfig, parallel: ParallelConfig, global_rank: int) -> int:
    """Bytes of the matrices, without routers and gates, which every rank has whole."""
    groups = groups_of(parallel.model_dump(), global_rank)
    with torch.device("meta"):
        model = DecoderModel(config, dtype=torch.float32, device=torch.device("meta"), groups=groups)
    weights = model.named_parameters()
    return sum(weight.nbytes for name, weight in weights if weight.dim() > 1 and "gate.weight" not in name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), parallels)
def test_the_fullest_rank_holds_what_was_expected(
    folder: Path, shape: dict[str, Any], parallel: ParallelConfig
) -> None:
    assume("num_experts" in shape or parallel.ep == parallel.moe_dp == 1)
    (folder / "config.json").write_text(json.dumps(shape))
    deploy = parse_config(f"model: {{path: {folder}}}\nprefill: {{parallel: {parallel.model_dump()}}}", "f.yaml")
    facts, config = read_model(deploy), read_model_config(folder)
    assert isinstance(facts, ModelFacts)
    # The ranks of a stage hold equally much.
    stages = {rank.pp: rank.global_rank for rank in positions(parallel)}
    held = max(held_bytes(config, parallel, rank) for rank in stages.values())
    assert weights_gib(deploy, deploy.prefill, facts) * GIB == pytest.approx(held, rel=1e-9)
