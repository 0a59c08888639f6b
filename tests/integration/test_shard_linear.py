"""CP ranks that store query and output projections together: greedy fp32 tokens equal transformers', and the memory of
the ranks equals the formula.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster.planner.model import facts_of
from cluster.planner.worker_memory import num_projections, weights_gib
from cluster.spec.config import DeployConfig, ParallelConfig
from cluster.spec.ids import Role
from cluster.spec.linear_shards import AHEAD
from cluster.spec.memory import GIB
from cluster.spec.ranks import stage_layers
from cluster.spec.strategy import Collectives, ShardLinear
from tests.fakes.local_engine import KV_WAYS, NUM_LOGPROBS, KvWay, LocalEngine, Models, asked, prompts_of

pytestmark = pytest.mark.integration

WORKER = "tests.fakes.choosing_worker:WorkerWithRotatingStrategies"
NUM_TOKENS = 8
LENGTHS = (1, 33, 90, 5)
RANK0, ALL_RANKS, PASS_KV, PASS_Q = KV_WAYS


class Case(NamedTuple):
    """One cluster, whose stages have unequal numbers of layers for the ranks."""

    family: str
    model: dict[str, Any]
    parallel: ParallelConfig
    way: ShardLinear
    kv: KvWay
    collectives: Collectives

    def __str__(self) -> str:
        sizes = "-".join(f"{axis}{size}" for axis, size in self.parallel if size > 1)
        return f"{self.family}-{sizes}-{self.way}-{self.kv}-{self.collectives}"


CASES = [
    Case(
        "llama",
        {"num_hidden_layers": 3, "attention_bias": True, "tie_word_embeddings": True},
        ParallelConfig(cp=2),
        ShardLinear.BROADCAST,
        ALL_RANKS,
        Collectives.TCP,
    ),
    Case(
        "qwen3_moe",
        {"num_hidden_layers": 4},
        ParallelConfig(cp=3),
        ShardLinear.BROADCAST,
        PASS_KV,
        Collectives.AUTO,
    ),
    Case(
        "mixtral",
        {"num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 12},
        ParallelConfig(cp=2, tp=2),
        ShardLinear.GATHER,
        PASS_Q,
        Collectives.TCP,
    ),
    Case("deepseek_v2", {"q_lora_rank": None}, ParallelConfig(cp=3), ShardLinear.GATHER, RANK0, Collectives.TCP),
    Case(
        "deepseek_v3",
        {"num_hidden_layers": 5},
        ParallelConfig(cp=2, pp=2),
        ShardLinear.BROADCAST,
        ALL_RANKS,
        Collectives.TCP,
    ),
    Case(
        "deepseek_v32",
        {"attention_bias": True},
        ParallelConfig(cp=3),
        ShardLinear.GATHER,
        PASS_Q,
        Collectives.AUTO,
    ),
    Case("qwen2", {}, ParallelConfig(dp=2, cp=2), ShardLinear.BROADCAST, ALL_RANKS, Collectives.AUTO),
]


def config_of(case: Case) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case.family},
            "kv": {"page_size": 16, "memory_gib": 0.01},
            "prefill": {
                "parallel": case.parallel,
                "mode": case.kv.mode,
                "passing": case.kv.passing,
                "chunk_tokens": 37,
                "shard_linear": case.way,
            },
            "resources": {"collectives": case.collectives},
            "transfer": {"mode": case.kv.sends},
        }
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_equal_transformers(models: Models, engine: LocalEngine, case: Case) -> None:
    prompts, folder = prompts_of(LENGTHS), models.folder(case.family, **case.model)
    oracle = models.oracle(folder, NUM_TOKENS)
    with engine.running(folder, config_of(case)) as cluster:
        # The second time, most pages are cached, and steps are short.
        for _ in range(2):
            answers = cluster.answer(asked(prompts, NUM_TOKENS, NUM_LOGPROBS), timeout_s=120)
            for prompt, answer in zip(prompts, answers, strict=True):
                oracle.check(prompt, answer)
    check_memory(case, engine, folder)
    for on_projections_s, in_all_s in engine.ask(Role.PREFILL, "communication_s"):
        assert 0 < on_projections_s <= in_all_s


def check_memory(case: Case, engine: LocalEngine, folder: Path) -> None:
    """Check that the fullest rank's memory equals the formula and what ``baton plan`` expects."""
    config = config_of(case)
    model, shards, parallel = facts_of(config, folder), config.prefill.linear_shards, config.prefill.parallel
    assert shards is not None
    held = engine.ask(Role.PREFILL, "matrix_bytes")
    assert max(sum(of_rank.values()) for of_rank in held) == weights_gib(config, config.prefill, model) * GIB
    projections = [
        sum(num_bytes for name, num_bytes in of_rank.items() if name.endswith((".stored", ".ring.memory")))
        for of_rank in held
    ]
    num_layers, cp = len(stage_layers(model.config.num_layers, parallel.pp, parallel.pp - 1)), parallel.cp
    assert max(projections) == num_projections(shards, config.prefill, model, num_layers) * 4
    layer = num_projections(None, config.prefill, model, num_layers=1) * 4
    if case.way is ShardLinear.BROADCAST:
        assert max(projections) == layer * (-(-num_layers // cp) + AHEAD + 1)
    else:
        # The last rank's rows may be padded.
        assert 1 <= max(projections) / (layer * (num_layers / cp + AHEAD + 1)) < 1.1
