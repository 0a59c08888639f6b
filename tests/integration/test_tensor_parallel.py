"""Greedy fp32 tokens of tensor parallel prefill and decode, of any two sizes, equal transformers' own."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.strategy import Strategy
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import LocalReplica
from tests.fakes.local_engine import KV_WAYS, KvWay, LocalEngine, Oracle, asked
from tests.fakes.pairwise import Case, all_pairs
from workers.process import RemoteError, WorkerProcess

NUM_TOKENS = 24
ODD: dict[str, Any] = {"vocab_size": 251, "intermediate_size": 97}
"""What comes out even on one rank only."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True, **ODD},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    "qwen3": {"num_key_value_heads": 1},
}
"""Biases and norms of every kind, and from 1 to 4 KV heads."""
FACTORS: dict[str, list[Any]] = {
    "family": list(MODELS),
    "prefill_tp": [1, 2, 4],
    "decode_tp": [1, 2, 4],
    "cp": [1, 2],
    "kv": KV_WAYS,
    "chunk_tokens": [4096, 37],
}
LENGTHS = (1, 33, 130, 5)


def of_few_processes(cases: list[Case]) -> list[Case]:
    """Eight at most: four TP ranks with two CP ranks each are left to the whole matrix."""
    return [{**case, "cp": 1} if case["prefill_tp"] == 4 else case for case in cases]


def in_loading_order(cases: list[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case["family"], case["prefill_tp"], case["cp"], case["decode_tp"]))


def name_of(case: Case) -> str:
    sides = f"tp{case['prefill_tp']}to{case['decode_tp']}-cp{case['cp']}"
    return f"{case['family']}-{sides}-{case['kv']}-{case['chunk_tokens']}"


def config_of(case: Case) -> DeployConfig:
    kv: KvWay = case["kv"]
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case["family"]},
            "kv": {"page_size": 16, "memory_gib": 0.01},
            "prefill": {
                "parallel": {"cp": case["cp"], "tp": case["prefill_tp"]},
                "strategy": Strategy.ZIGZAG,
                "mode": kv.mode,
                "passing": kv.passing,
                "chunk_tokens": case["chunk_tokens"],
            },
            "decode": {"parallel": {"tp": case["decode_tp"]}},
            "transfer": {"mode": kv.sends, "verify": "digest"},
        }
    )


DAMAGED = r"^CheckpointError: .*model.safetensors is damaged"
UNREADABLE = r"^UnsupportedModelError: .*config.json"


class Both:
    """Our engine and the oracle."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.engine = LocalEngine()
        self.folders = folders
        self._oracle = cache(lambda family: Oracle(folders[family], NUM_TOKENS))

    def check(self, case: Case) -> None:
        """All prompts at once, twice: the second time their pages are cached on both sides."""
        rng = random.Random(11)
        prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in LENGTHS]
        theirs = [self._oracle(case["family"]).tokens(prompt) for prompt in prompts]
        with self.engine.running(self.folders[case["family"]], config_of(case)) as cluster:
            assert cluster.generate(asked(prompts, NUM_TOKENS), timeout_s=120) == theirs
            assert cluster.generate(asked(prompts, NUM_TOKENS), timeout_s=120) == theirs


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    root = tmp_path_factory.mktemp("checkpoints")
    both = Both({family: make_checkpoint(root / family, family, seed=11, **model) for family, model in MODELS.items()})
    yield both
    both.engine.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("parallel", "rank", "damaged", "error"),
    [
        ({"tp": 2}, 1, "model.safetensors", DAMAGED),
        ({"pp": 2}, 0, "model.safetensors", DAMAGED),
        pytest.param({"pp": 2}, 1, "model.safetensors", DAMAGED, marks=pytest.mark.full),
        pytest.param({"dp": 2}, 1, "model.safetensors", DAMAGED, marks=pytest.mark.full),
        ({"tp": 2}, 1, "config.json", UNREADABLE),
        pytest.param({"tp": 2}, 0, "config.json", UNREADABLE, marks=pytest.mark.full),
    ],
)
def test_the_rank_that_fails_is_named_and_no_rank_waits_for_it(
    both: Both, tmp_path: Path, parallel: dict[str, int], rank: int, damaged: str, error: str
) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    if damaged == "config.json":
        (folder / damaged).unlink()
    else:
        (folder / damaged).write_bytes(b"not tensors")
    config = DeployConfig.model_validate({"prefill": {"parallel": parallel}, "kv": {"memory_gib": 0.01}})
    processes = [WorkerProcess() for _ in range(2)]
    try:
        replica = LocalReplica(config, Role.PREFILL, both.folders["llama"], processes)
        replica.workers[rank].call("make", replica.specs[rank], folder, None)
        replica.workers[rank].result()
        with pytest.raises(RemoteError, match=error):
            replica.load()
    finally:
        for process in processes:
            process.close()


@pytest.mark.integration
@pytest.mark.parametrize("case", in_loading_order(of_few_processes(all_pairs(FACTORS))), ids=name_of)
def test_tokens_equal_transformers_for_all_pairs_of_factors(both: Both, case: Case) -> None:
    both.check(case)
