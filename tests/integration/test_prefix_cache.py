"""Greedy fp32 tokens equal transformers' own whatever of a prompt is cached, on both sides or on one."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.lifecycle import Role
from cluster.spec.strategy import Strategy
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_engine import KV_WAYS, KvWay, LocalEngine, Oracle, asked
from tests.fakes.pairwise import Case, all_pairs

PAGE_SIZE = 16
NUM_TOKENS = 40
FACTORS: dict[str, list[Any]] = {
    "cp": [1, 2, 3, 4],
    "strategy": list(Strategy),
    "kv": KV_WAYS,
    "chunk_tokens": [4096, 37],
    "caching": [set(Role), {Role.PREFILL}, {Role.DECODE}, set()],
}


def in_loading_order(cases: list[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case["cp"], case["kv"].mode))


def draw(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


LONG, SHORT = draw(1, 6 * PAGE_SIZE), draw(2, 5)


def name_of(case: Case) -> str:
    caching = "+".join(sorted(case["caching"])) or "nobody"
    return f"cp{case['cp']}-{case['strategy']}-{case['kv']}-{case['chunk_tokens']}-{caching}-caches"


def config_of(case: Case, role: Role) -> DeployConfig:
    kv: KvWay = case["kv"]
    return DeployConfig.model_validate(
        {
            "model": {"served_name": "qwen3"},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.02, "prefix_cache": role in case["caching"]},
            "prefill": {
                "parallel": {"cp": case["cp"]},
                "strategy": case["strategy"],
                "mode": kv.mode,
                "passing": kv.passing,
                "chunk_tokens": case["chunk_tokens"],
            },
            "transfer": {"mode": kv.sends, "page_filter": kv.page_filter},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3", seed=11)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder, NUM_TOKENS)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    engine.close()


def follow_ups(oracle: Oracle) -> dict[str, tuple[list[int], int]]:
    """Prompts to ask after LONG and SHORT, by prefix state, with the pages that prefill should find."""
    long_turn = [*LONG, *oracle.tokens(LONG)]
    short_turn = [*SHORT, *oracle.tokens(SHORT)]
    return {
        "none": (draw(3, 70), 0),
        "parts in a page": ([*LONG[: 2 * PAGE_SIZE + 7], *draw(4, 60)], 2),
        "parts between pages": ([*LONG[: 3 * PAGE_SIZE], *draw(5, 1)], 3),
        "full": (LONG, 5),
        "longer": ([*LONG, *draw(6, 21)], 6),
        "more of it on decode": ([*long_turn, *draw(7, 9)], 6),
        "on decode only": (short_turn, 0),
    }


def check(case: Case, folder: Path, oracle: Oracle, engine: LocalEngine) -> None:
    prompts = follow_ups(oracle)
    with engine.running(folder, config_of(case, Role.PREFILL), config_of(case, Role.DECODE)) as cluster:
        first = cluster.generate(asked([LONG, SHORT], NUM_TOKENS), timeout_s=120)
        answers = cluster.answer(asked([prompt for prompt, _ in prompts.values()], NUM_TOKENS), timeout_s=120)
    assert first == [oracle.tokens(prompt) for prompt in (LONG, SHORT)]
    for (state, (prompt, num_pages)), answer in zip(prompts.items(), answers, strict=True):
        assert answer.token_ids == oracle.tokens(prompt), state
        assert answer.cached_tokens == (num_pages * PAGE_SIZE if Role.PREFILL in case["caching"] else 0), state


@pytest.mark.integration
@pytest.mark.parametrize("case", in_loading_order(all_pairs(FACTORS)), ids=name_of)
def test_tokens_do_not_depend_on_what_is_cached(case: Case, folder: Path, oracle: Oracle, engine: LocalEngine) -> None:
    check(case, folder, oracle, engine)


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    in_loading_order([dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]),
    ids=name_of,
)
def test_tokens_do_not_depend_on_what_is_cached_in_any_combination(
    case: Case, folder: Path, oracle: Oracle, engine: LocalEngine
) -> None:
    check(case, folder, oracle, engine)
