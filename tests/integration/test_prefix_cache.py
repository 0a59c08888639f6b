"""Greedy fp32 tokens equal transformers' own whatever of a prompt is cached, on both sides or on one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.spec.config import DeployConfig
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Stopping
from cluster.spec.registry import PageFilter, TransferMode
from cluster.spec.strategy import Strategy
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.pairwise import Case, all_pairs
from workers.local import LocalCluster, Prompt

PAGE_SIZE = 16
NUM_TOKENS = 40
FACTORS: dict[str, list[Any]] = {
    "cp": [1, 2, 3],
    "strategy": list(Strategy),
    "sending": [
        (TransferMode.RANK0, PageFilter.MODULAR),
        (TransferMode.ALL_RANKS, PageFilter.MODULAR),
        (TransferMode.ALL_RANKS, PageFilter.CONTIGUOUS),
    ],
    "chunk_tokens": [4096, 37],
    "caching": [set(Role), {Role.PREFILL}, {Role.DECODE}, set()],
}
CASES = sorted(all_pairs(FACTORS), key=lambda case: case["cp"])


def draw(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


LONG, SHORT = draw(1, 6 * PAGE_SIZE), draw(2, 5)


def name_of(case: Case) -> str:
    mode, page_filter = case["sending"]
    caching = "+".join(sorted(case["caching"])) or "nobody"
    return f"cp{case['cp']}-{case['strategy']}-{mode}-{page_filter}-{case['chunk_tokens']}-{caching}-caches"


def config_of(case: Case, role: Role) -> DeployConfig:
    mode, page_filter = case["sending"]
    return DeployConfig.model_validate(
        {
            "model": {"served_name": "qwen3"},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.02, "prefix_cache": role in case["caching"]},
            "prefill": {
                "parallel": {"cp": case["cp"]},
                "strategy": case["strategy"],
                "chunk_tokens": case["chunk_tokens"],
            },
            "transfer": {"mode": mode, "page_filter": page_filter},
        }
    )


class Oracle:
    """transformers' own greedy tokens."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokens = cache(self._generate)

    def _generate(self, prompt: tuple[int, ...]) -> list[int]:
        with torch.inference_mode():
            tokens = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
            )
        answer: list[int] = tokens[0, len(prompt) :].tolist()
        return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3", seed=11)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


class Engine:
    """A local cluster that reloads only when the layout changes."""

    def __init__(self, folder: Path) -> None:
        self.cluster = LocalCluster()
        self._folder = folder
        self._cp: int | None = None

    @contextmanager
    def running(self, case: Case) -> Iterator[LocalCluster]:
        config = config_of(case, Role.PREFILL)
        if self._cp != case["cp"]:
            self._cp = None
            self.cluster.load(config, self._folder)
            self._cp = case["cp"]
        with self.cluster.running(config, config_of(case, Role.DECODE)) as running:
            yield running


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder)
    yield engine
    engine.cluster.close()


def follow_ups(oracle: Oracle) -> dict[str, tuple[list[int], int]]:
    """Prompts to ask after LONG and SHORT, by prefix state, with the pages that prefill should find."""
    long_turn = [*LONG, *oracle.tokens(tuple(LONG))]
    short_turn = [*SHORT, *oracle.tokens(tuple(SHORT))]
    return {
        "none": (draw(3, 70), 0),
        "parts in a page": ([*LONG[: 2 * PAGE_SIZE + 7], *draw(4, 60)], 2),
        "parts between pages": ([*LONG[: 3 * PAGE_SIZE], *draw(5, 1)], 3),
        "full": (LONG, 5),
        "longer": ([*LONG, *draw(6, 21)], 6),
        "more of it on decode": ([*long_turn, *draw(7, 9)], 6),
        "on decode only": (short_turn, 0),
    }


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_do_not_depend_on_what_is_cached(case: Case, oracle: Oracle, engine: Engine) -> None:
    prompts = follow_ups(oracle)
    with engine.running(case) as cluster:
        first = cluster.generate(asked([LONG, SHORT]), timeout_s=120)
        answers = cluster.answer(asked([prompt for prompt, _ in prompts.values()]), timeout_s=120)
    assert first == [oracle.tokens(tuple(prompt)) for prompt in (LONG, SHORT)]
    for (state, (prompt, num_pages)), answer in zip(prompts.items(), answers, strict=True):
        assert answer.token_ids == oracle.tokens(tuple(prompt)), state
        assert answer.cached_tokens == (num_pages * PAGE_SIZE if Role.PREFILL in case["caching"] else 0), state


def asked(prompts: list[list[int]]) -> list[Prompt]:
    return [Prompt(prompt, Stopping(max_tokens=NUM_TOKENS)) for prompt in prompts]
