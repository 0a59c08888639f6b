"""Greedy fp32 tokens equal transformers' if CP ranks store query and output projections together."""

from typing import Any, NamedTuple

import pytest

from cluster.spec.config import DeployConfig, ParallelConfig
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
    ahead: int
    kv: KvWay
    collectives: Collectives

    def __str__(self) -> str:
        sizes = "-".join(f"{axis}{size}" for axis, size in self.parallel if size > 1)
        return f"{self.family}-{sizes}-{self.way}{self.ahead}-{self.kv}-{self.collectives}"


CASES = [
    Case(
        "llama",
        {"num_hidden_layers": 3, "attention_bias": True, "tie_word_embeddings": True},
        ParallelConfig(cp=2),
        ShardLinear.BROADCAST,
        1,
        ALL_RANKS,
        Collectives.TCP,
    ),
    Case(
        "qwen3_moe",
        {"num_hidden_layers": 4},
        ParallelConfig(cp=3),
        ShardLinear.BROADCAST,
        2,
        PASS_KV,
        Collectives.AUTO,
    ),
    Case(
        "mixtral",
        {"num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 12},
        ParallelConfig(cp=2, tp=2),
        ShardLinear.GATHER,
        1,
        PASS_Q,
        Collectives.TCP,
    ),
    Case("deepseek_v2", {"q_lora_rank": None}, ParallelConfig(cp=3), ShardLinear.GATHER, 0, RANK0, Collectives.TCP),
    Case(
        "deepseek_v3",
        {"num_hidden_layers": 5},
        ParallelConfig(cp=2, pp=2),
        ShardLinear.BROADCAST,
        1,
        ALL_RANKS,
        Collectives.TCP,
    ),
    Case(
        "deepseek_v32",
        {"attention_bias": True},
        ParallelConfig(cp=3),
        ShardLinear.GATHER,
        1,
        PASS_Q,
        Collectives.AUTO,
    ),
    Case("qwen2", {}, ParallelConfig(dp=2, cp=2), ShardLinear.BROADCAST, 0, ALL_RANKS, Collectives.AUTO),
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
                "shard_linear_ahead": case.ahead,
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
