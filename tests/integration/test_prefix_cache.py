"""Greedy fp32 tokens equal transformers' own whatever of a prompt is cached, on both sides or on one."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.strategy import Collectives, StrategySetting
from tests.fakes.checkpoints import DENSE, make_checkpoint
from tests.fakes.local_engine import KV_WAYS, NUM_LOGPROBS, KvWay, LocalEngine, Oracle, asked
from tests.fakes.pairwise import Case, all_pairs

PAGE_SIZE = 16
NUM_TOKENS = 40
CROSSED: dict[str, list[Any]] = {
    "cp": [1, 2, 3, 4],
    "strategy": list(StrategySetting),
    "kv": KV_WAYS,
    "chunk_tokens": [4096, 37, 3],
    "caching": [set(Role), {Role.PREFILL}, {Role.DECODE}, set()],
    "batch": ["together", "in turn"],
}
TURNING: dict[str, list[Any]] = {"family": list(DENSE), "collectives": list(Collectives)}


def in_loading_order(cases: list[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case["family"], case["cp"], case["kv"].mode, case["collectives"]))


def draw(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


LONG, SHORT = draw(1, 6 * PAGE_SIZE), draw(2, 5)


def name_of(case: Case) -> str:
    caching = "+".join(sorted(case["caching"])) or "nobody"
    ways = "-".join(map(str, (case["strategy"], case["kv"], case["chunk_tokens"], case["batch"], case["collectives"])))
    return f"{case['family']}-cp{case['cp']}-{ways}-{caching}-caches"


def config_of(case: Case, role: Role) -> DeployConfig:
    kv: KvWay = case["kv"]
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case["family"]},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.02, "prefix_cache": role in case["caching"]},
            "prefill": {
                "parallel": {"cp": case["cp"]},
                "strategy": case["strategy"],
                "mode": kv.mode,
                "passing": kv.passing,
                "chunk_tokens": case["chunk_tokens"],
            },
            "resources": {"collectives": case["collectives"]},
            "transfer": {"mode": kv.sends},
        }
    )


class Both:
    """Our engine and the oracles."""

    def __init__(self, root: Path) -> None:
        self.engine = LocalEngine()
        self.folders = {family: make_checkpoint(root / family, family, seed=11) for family in DENSE}
        self.oracle = cache(lambda family: Oracle(self.folders[family], NUM_TOKENS))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    both = Both(tmp_path_factory.mktemp("checkpoints"))
    yield both
    both.engine.close()


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


def check(case: Case, both: Both) -> None:
    oracle = both.oracle(case["family"])
    prompts = follow_ups(oracle)
    configs = config_of(case, Role.PREFILL), config_of(case, Role.DECODE)
    with both.engine.running(both.folders[case["family"]], *configs) as cluster:
        first = cluster.generate(asked([LONG, SHORT], NUM_TOKENS), timeout_s=120)
        requests = asked([prompt for prompt, _ in prompts.values()], NUM_TOKENS, NUM_LOGPROBS)
        batches = [requests] if case["batch"] == "together" else [[request] for request in requests]
        answers = [answer for batch in batches for answer in cluster.answer(batch, timeout_s=120)]
    assert first == [oracle.tokens(prompt) for prompt in (LONG, SHORT)]
    for (state, (prompt, num_pages)), answer in zip(prompts.items(), answers, strict=True):
        oracle.check(prompt, answer, state)
        assert answer.cached.total == (num_pages * PAGE_SIZE if Role.PREFILL in case["caching"] else 0), state


@pytest.mark.integration
@pytest.mark.parametrize("case", in_loading_order(all_pairs(CROSSED | TURNING)), ids=name_of)
def test_tokens_do_not_depend_on_what_is_cached(case: Case, both: Both) -> None:
    check(case, both)
