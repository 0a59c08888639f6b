"""Greedy fp32 tokens of real prefill and decode processes equal transformers' own, for every way to cut a prompt.

So do log-probabilities: a wrong page or position that does not change the likeliest token shows in them.
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.registry import TransferMode, Verify
from cluster.spec.strategy import Collectives, CpMode, Strategy, StrategySetting
from tests.fakes.checkpoints import DENSE, make_checkpoint
from tests.fakes.local_engine import KV_WAYS, NUM_LOGPROBS, KvWay, LocalEngine, Oracle, asked
from tests.fakes.pairwise import Case, all_in_turn, all_pairs

NUM_TOKENS = 64
PAGE_SIZE = 16
MOONCAKE: Case = {
    "family": "qwen3",
    "cp": 3,
    "strategy": StrategySetting.ZIGZAG,
    "chunk_tokens": 37,
    "lengths": (1, 33, 64, 130, 5),
    "collectives": Collectives.AUTO,
}
CROSSED: dict[str, list[Any]] = {
    "cp": [1, 2, 3, 4],
    "strategy": list(StrategySetting),
    "kv": KV_WAYS,
    "chunk_tokens": [4096, 37, 3],
    "lengths": [(1,), (3, 1, 2), (200,), (1, 33, 64, 130, 5)],
}
TURNING: dict[str, list[Any]] = {"family": list(DENSE), "collectives": list(Collectives)}


def in_loading_order(cases: list[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case["family"], case["cp"], case["kv"].mode, case["collectives"]))


def name_of(case: Case) -> str:
    lengths = "+".join(map(str, case["lengths"]))
    ways = "-".join(map(str, (case["strategy"], case["kv"], case["chunk_tokens"], lengths, case["collectives"])))
    return f"{case['family']}-cp{case['cp']}-{ways}"


def config_of(case: Case, backend: str = "shared_memory") -> DeployConfig:
    kv: KvWay = case["kv"]
    verify = Verify.DIGEST if backend == "mooncake" else Verify.COUNTS
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case["family"]},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.02},
            "prefill": {
                "parallel": {"cp": case["cp"]},
                "strategy": case["strategy"],
                "mode": kv.mode,
                "passing": kv.passing,
                "chunk_tokens": case["chunk_tokens"],
            },
            "resources": {"collectives": case["collectives"]},
            "transfer": {"backend": backend, "mode": kv.sends, "verify": verify},
        }
    )


class Both:
    """Our engine and the oracle."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.engine = LocalEngine("tests.fakes.choosing_worker:WorkerWithCheapExchange")
        self._folders = folders
        self._oracle = cache(lambda family: Oracle(folders[family], NUM_TOKENS))

    def check(self, case: Case, backend: str = "shared_memory") -> None:
        """Our answers to the case's prompts are transformers'."""
        prompts = prompts_of(case["lengths"])
        with self.engine.running(self._folders[case["family"]], config_of(case, backend)) as cluster:
            answers = cluster.answer(asked(prompts, NUM_TOKENS, NUM_LOGPROBS), timeout_s=120)
        oracle = self._oracle(case["family"])
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.check(prompt, answer)
        self._check_ways(case)

    def _check_ways(self, case: Case) -> None:
        """Check that the leader reports every token, computed in the way that was asked for."""
        steps = self.engine.ask(Role.PREFILL, "told_load")[0].steps
        assert sum(times.num_tokens for times in steps) == sum(case["lengths"])
        ways = {(times.strategy, times.passing) for times in steps}
        kv: KvWay = case["kv"]
        strategies = case["strategy"].candidates if case["cp"] > 1 else (Strategy.NONE,)
        passings = kv.passing.candidates if case["cp"] > 1 and kv.mode is CpMode.RING else (None,)
        assert ways <= set(product(strategies, passings))
        if case["strategy"] is StrategySetting.AUTO and case["cp"] > 1 and max(case["lengths"]) > 1:
            assert {strategy for strategy, _ in ways} - {Strategy.NONE}, (
                "where an exchange is cheap, tokens are divided"
            )


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(repr(lengths))
    return [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    root = tmp_path_factory.mktemp("checkpoints")
    both = Both({family: make_checkpoint(root / family, family, seed=11) for family in DENSE})
    yield both
    both.engine.close()


@pytest.mark.integration
@pytest.mark.parametrize("case", in_loading_order(all_pairs(CROSSED | TURNING)), ids=name_of)
def test_tokens_equal_transformers_for_all_pairs_of_factors(both: Both, case: Case) -> None:
    both.check(case)


@pytest.mark.integration
@pytest.mark.mooncake
@pytest.mark.parametrize("kv", [KvWay(sends=TransferMode.RANK0)], ids=str)
def test_tokens_equal_transformers_over_mooncake(both: Both, kv: KvWay) -> None:
    both.check({**MOONCAKE, "kv": kv}, backend="mooncake")


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize("case", in_loading_order(all_in_turn(CROSSED, TURNING)), ids=name_of)
def test_tokens_equal_transformers_for_the_whole_matrix(both: Both, case: Case) -> None:
    both.check(case)
