"""Greedy fp32 tokens equal transformers' for every CP strategy and every amount of cached tokens.

Log-probabilities are compared, too. They reveal wrong pages or positions that do not change the most likely token.
"""

from itertools import product
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.registry import TransferMode, Verify
from cluster.spec.strategy import Collectives, CpMode, Strategy, StrategySetting
from tests.fakes.checkpoints import DENSE
from tests.fakes.local_engine import KV_WAYS, NUM_LOGPROBS, KvWay, LocalEngine, Models, Oracle, asked, prompts_of
from tests.fakes.pairwise import Case, all_in_turn, all_pairs

pytestmark = pytest.mark.integration

WORKER = "tests.fakes.choosing_worker:WorkerWithCheapExchange"
NUM_TOKENS, MANY_TOKENS = 20, 64
"""Number of tokens of an answer in pairs of factors, and in the whole matrix."""
PAGE_SIZE = 8
MOONCAKE: Case = {
    "family": "qwen3",
    "cp": 3,
    "strategy": StrategySetting.ZIGZAG,
    "kv": KvWay(sends=TransferMode.RANK0),
    "chunk_tokens": 37,
    "lengths": (1, 33, 64, 130, 5),
    "collectives": Collectives.AUTO,
}
WAYS: dict[str, list[Any]] = {
    "cp": [1, 2, 3, 4],
    "strategy": list(StrategySetting),
    "kv": KV_WAYS,
    "chunk_tokens": [4096, 37, 3],
}
CROSSED = WAYS | {"lengths": [(1,), (3, 1, 2), (60,), (1, 17, 32, 50, 5)]}
CACHED = WAYS | {"caching": [set(Role), {Role.PREFILL}, {Role.DECODE}, set()], "batch": ["together", "in turn"]}
TURNING: dict[str, list[Any]] = {"family": list(DENSE), "collectives": list(Collectives)}
LONG, SHORT, *OTHERS = prompts_of((6 * PAGE_SIZE, 5, 40, 30, 1, 11, 5))
"""Prompts that are cached, and parts of the prompts that extend them."""


def in_loading_order(cases: list[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case["family"], case["cp"], case["kv"].mode, case["collectives"]))


def name_of(case: Case) -> str:
    if "lengths" in case:
        asked = "+".join(map(str, case["lengths"]))
    else:
        asked = f"{case['batch']}-{'+'.join(sorted(case['caching'])) or 'nobody'}-caches"
    ways = "-".join(map(str, (case["strategy"], case["kv"], case["chunk_tokens"], asked, case["collectives"])))
    return f"{case['family']}-cp{case['cp']}-{ways}"


def config_of(case: Case, role: Role = Role.PREFILL, backend: str = "shared_memory") -> DeployConfig:
    kv: KvWay = case["kv"]
    verify = Verify.DIGEST if backend == "mooncake" else Verify.COUNTS
    prefix_cache = role in case.get("caching", Role)
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case["family"]},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.02, "prefix_cache": prefix_cache},
            "prefill": {
                "parallel": {"cp": case["cp"]},
                "strategy": case["strategy"],
                "mode": kv.mode,
                "passing": kv.passing,
                "chunk_tokens": case["chunk_tokens"],
            },
            "resources": {"collectives": case["collectives"], **case.get("resources", {})},
            "transfer": {"backend": backend, "mode": kv.sends, "verify": verify},
        }
    )


def check(
    case: Case,
    models: Models,
    engine: LocalEngine,
    backend: str = "shared_memory",
    num_tokens: int = NUM_TOKENS,
) -> None:
    """Check that the answers to the case's prompts equal transformers'."""
    prompts, folder = prompts_of(case["lengths"]), models.folder(case["family"])
    with engine.running(folder, config_of(case, backend=backend)) as cluster:
        answers = cluster.answer(asked(prompts, num_tokens, NUM_LOGPROBS), timeout_s=120)
    for prompt, answer in zip(prompts, answers, strict=True):
        models.oracle(folder, num_tokens).check(prompt, answer)
    check_ways(case, engine)


def check_ways(case: Case, engine: LocalEngine) -> None:
    """Check that the leader reports every token under the requested strategy."""
    steps = engine.ask(Role.PREFILL, "last_load")[0].steps
    assert sum(times.num_tokens for times in steps) == sum(case["lengths"])
    ways = {(times.strategy, times.passing) for times in steps}
    kv: KvWay = case["kv"]
    strategies = case["strategy"].candidates if case["cp"] > 1 else (Strategy.NONE,)
    passings = kv.passing.candidates if case["cp"] > 1 and kv.mode is CpMode.RING else (None,)
    assert ways <= set(product(strategies, passings))
    if case["strategy"] is StrategySetting.AUTO and case["cp"] > 1 and max(case["lengths"]) > 1:
        assert {strategy for strategy, _ in ways} - {Strategy.NONE}, "where an exchange is cheap, tokens are divided"


@pytest.mark.parametrize("case", in_loading_order(all_pairs(CROSSED | TURNING)), ids=name_of)
def test_tokens_equal_transformers_for_all_pairs_of_factors(models: Models, engine: LocalEngine, case: Case) -> None:
    check(case, models, engine)


@pytest.mark.mooncake
def test_tokens_equal_transformers_over_mooncake(models: Models, engine: LocalEngine) -> None:
    check(MOONCAKE, models, engine, backend="mooncake")


@pytest.mark.full
@pytest.mark.parametrize("case", in_loading_order(all_in_turn(CROSSED, TURNING)), ids=name_of)
def test_tokens_equal_transformers_for_the_whole_matrix(models: Models, engine: LocalEngine, case: Case) -> None:
    check(case, models, engine, num_tokens=MANY_TOKENS)


def follow_ups(oracle: Oracle) -> dict[str, tuple[list[int], int]]:
    """Return prompts to send after LONG and SHORT by prefix state, with the pages that prefill should find."""
    long_turn = [*LONG, *oracle.tokens(LONG)]
    short_turn = [*SHORT, *oracle.tokens(SHORT)]
    return {
        "none": (OTHERS[0], 0),
        "parts in a page": ([*LONG[: 2 * PAGE_SIZE + 7], *OTHERS[1]], 2),
        "parts between pages": ([*LONG[: 3 * PAGE_SIZE], *OTHERS[2]], 3),
        "full": (LONG, 5),
        "longer": ([*LONG, *OTHERS[3]], 6),
        "more of it on decode": ([*long_turn, *OTHERS[4]], 6),
        "on decode only": (short_turn, 0),
    }


def check_caching(case: Case, models: Models, engine: LocalEngine) -> None:
    """Check that the answers to follow-up prompts equal transformers' and use the expected pages."""
    folder = models.folder(case["family"])
    oracle = models.oracle(folder, NUM_TOKENS)
    prompts = follow_ups(oracle)
    with engine.running(folder, *(config_of(case, role) for role in (Role.PREFILL, Role.DECODE))) as cluster:
        first = cluster.generate(asked([LONG, SHORT], NUM_TOKENS), timeout_s=120)
        requests = asked([prompt for prompt, _ in prompts.values()], NUM_TOKENS, NUM_LOGPROBS)
        batches = [requests] if case["batch"] == "together" else [[request] for request in requests]
        answers = [answer for batch in batches for answer in cluster.answer(batch, timeout_s=120)]
    assert first == [oracle.tokens(prompt) for prompt in (LONG, SHORT)]
    for (state, (prompt, num_pages)), answer in zip(prompts.items(), answers, strict=True):
        oracle.check(prompt, answer, state)
        assert answer.cached.total == (num_pages * PAGE_SIZE if Role.PREFILL in case["caching"] else 0), state


@pytest.mark.parametrize("case", in_loading_order(all_pairs(CACHED | TURNING)), ids=name_of)
def test_tokens_do_not_depend_on_what_is_cached(models: Models, engine: LocalEngine, case: Case) -> None:
    check_caching(case, models, engine)
