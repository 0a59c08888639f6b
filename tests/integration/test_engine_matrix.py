"""Greedy fp32 tokens of real prefill and decode processes equal transformers' own, for every way to cut a prompt."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.spec.config import DeployConfig
from cluster.spec.messages import Stopping
from cluster.spec.registry import PageFilter, TransferMode
from cluster.spec.strategy import Strategy
from tests.fakes.checkpoints import FAMILIES, make_checkpoint
from tests.fakes.pairwise import Case, all_pairs
from workers.local import LocalCluster, Prompt

NUM_TOKENS = 64
MOONCAKE: Case = {
    "family": "qwen3",
    "cp": 3,
    "strategy": Strategy.ZIGZAG,
    "sending": (TransferMode.ALL_RANKS, PageFilter.MODULAR),
    "chunk_tokens": 37,
    "lengths": (1, 33, 64, 130, 5),
}
PAGE_SIZE = 16
SENDING = [
    (TransferMode.RANK0, PageFilter.MODULAR),
    (TransferMode.ALL_RANKS, PageFilter.MODULAR),
    (TransferMode.ALL_RANKS, PageFilter.CONTIGUOUS),
]
FACTORS: dict[str, list[Any]] = {
    "family": list(FAMILIES),
    "cp": [1, 2, 3, 4],
    "strategy": list(Strategy),
    "sending": SENDING,
    "chunk_tokens": [4096, 37],
    "lengths": [(1,), (3, 1, 2), (200,), (1, 33, 64, 130, 5)],
}


def in_loading_order(cases: list[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case["family"], case["cp"]))


def name_of(case: Case) -> str:
    mode, page_filter = case["sending"]
    lengths = "+".join(map(str, case["lengths"]))
    return f"{case['family']}-cp{case['cp']}-{case['strategy']}-{mode}-{page_filter}-{case['chunk_tokens']}-{lengths}"


def config_of(case: Case, backend: str = "shared_memory") -> DeployConfig:
    mode, page_filter = case["sending"]
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case["family"]},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.02},
            "prefill": {
                "parallel": {"cp": case["cp"]},
                "strategy": case["strategy"],
                "chunk_tokens": case["chunk_tokens"],
            },
            "transfer": {"backend": backend, "mode": mode, "page_filter": page_filter},
        }
    )


class Engine:
    """A local cluster that reloads only when the model or the layout changes, and the oracle beside it."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._cluster = LocalCluster()
        self._loaded: tuple[str, int, str] | None = None
        self._oracle = cache(self._generate)

    def answers(self, case: Case, backend: str = "shared_memory") -> tuple[list[list[int]], list[list[int]]]:
        """Our tokens and transformers' for the case's prompts."""
        layout = (case["family"], case["cp"], backend)
        config = config_of(case, backend)
        if self._loaded != layout:
            self._loaded = None
            self._cluster.load(config, self._folders[case["family"]])
            self._loaded = layout
        prompts = prompts_of(case["lengths"])
        with self._cluster.running(config):
            ours = self._cluster.generate(
                [Prompt(prompt, Stopping(max_tokens=NUM_TOKENS)) for prompt in prompts], timeout_s=120
            )
        return ours, [self._oracle(case["family"], tuple(prompt)) for prompt in prompts]

    def close(self) -> None:
        self._cluster.close()

    def _generate(self, family: str, prompt: tuple[int, ...]) -> list[int]:
        model = self._model(family)
        with torch.inference_mode():
            tokens = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
            )
        answer: list[int] = tokens[0, len(prompt) :].tolist()
        return answer

    @cache  # noqa: B019 - one engine lives as long as the module
    def _model(self, family: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._folders[family], dtype=torch.float32)


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(repr(lengths))
    return [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {family: make_checkpoint(root / family, family, seed=11) for family in FAMILIES}
    engine = Engine(folders)
    yield engine
    engine.close()


@pytest.mark.integration
@pytest.mark.parametrize("case", in_loading_order(all_pairs(FACTORS)), ids=name_of)
def test_tokens_equal_transformers_for_all_pairs_of_factors(engine: Engine, case: Case) -> None:
    ours, theirs = engine.answers(case)
    assert ours == theirs


@pytest.mark.integration
@pytest.mark.mooncake
@pytest.mark.parametrize("mode", [TransferMode.RANK0, TransferMode.ALL_RANKS])
def test_tokens_equal_transformers_over_mooncake(engine: Engine, mode: TransferMode) -> None:
    ours, theirs = engine.answers({**MOONCAKE, "sending": (mode, PageFilter.CONTIGUOUS)}, backend="mooncake")
    assert ours == theirs


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    in_loading_order([dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]),
    ids=name_of,
)
def test_tokens_equal_transformers_for_the_whole_matrix(engine: Engine, case: Case) -> None:
    ours, theirs = engine.answers(case)
    assert ours == theirs
