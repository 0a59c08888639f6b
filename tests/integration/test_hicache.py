"""Greedy fp32 tokens equal transformers' own whichever tiers hold a prompt, and the answer says which did."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.strategy import CpMode
from cluster.spec.tiers import CachedTokens, Tier
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_engine import LocalEngine, Oracle, asked
from workers.local import Answer, LocalCluster

pytestmark = pytest.mark.integration

Way = tuple[int, CpMode, int]
PAGE_SIZE = 16
NUM_TOKENS = 20
GATHER, RING = CpMode
SOME = [(1, GATHER, 2), (2, GATHER, 2), (3, RING, 1), (4, RING, 1)]
"""Ways to cut prefill: cp, mode, tp."""


def draw(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


LONG = draw(1, 9 * PAGE_SIZE + 3)
HALF = LONG[: 4 * PAGE_SIZE + 1]


def config_of(way: Way, folder: Path, **hicache: Any) -> DeployConfig:
    cp, mode, tp = way
    storage = {"backend": "files", "folder": str(folder), "prefetch_min_tokens": 1, "prefetch": "wait_complete"}
    return DeployConfig.model_validate(
        {
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "prefill": {"parallel": {"cp": cp, "tp": tp}, "mode": mode, "chunk_tokens": 50},
            "decode": {"parallel": {"tp": tp}},
            "hicache": {"host_gib": 0.01, "storage": storage, **hicache},
        }
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", seed=11)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint, NUM_TOKENS)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    engine.close()


def ask(cluster: LocalCluster, prompt: list[int]) -> Answer:
    (answer,) = cluster.answer(asked([prompt], NUM_TOKENS), timeout_s=120)
    return answer


def ask_until(cluster: LocalCluster, prompt: list[int], oracle: Oracle, *flushed: Tier, **tokens: int) -> None:
    """Copies are made beside the work, so that the first answers may come before them; all must be right."""
    for _ in range(50):
        cluster.flush(*flushed)
        answer = ask(cluster, prompt)
        assert answer.token_ids == oracle.tokens(prompt)
        if (answer.cached.host, answer.cached.storage) == (tokens["host"], tokens["storage"]):
            return
    raise AssertionError(f"never {tokens}, at last {answer}")


def check(way: Way, checkpoint: Path, oracle: Oracle, engine: LocalEngine, folder: Path) -> None:
    all_pages, half_pages = 9 * PAGE_SIZE, 4 * PAGE_SIZE
    with engine.running(checkpoint, config_of(way, folder)) as cluster:
        assert ask(cluster, LONG).token_ids == oracle.tokens(LONG)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, host=all_pages, storage=0)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=all_pages)
        ask_until(cluster, HALF, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=half_pages)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, host=half_pages, storage=all_pages - half_pages)


@pytest.mark.parametrize("way", SOME, ids=str)
def test_tokens_do_not_depend_on_the_tiers_that_have_a_prompt(
    way: Way, checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    check(way, checkpoint, oracle, engine, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("way", list(product((1, 2, 3, 4), CpMode, (1, 2))), ids=str)
def test_tokens_do_not_depend_on_the_tiers_that_have_a_prompt_under_any_cut(
    way: Way, checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    check(way, checkpoint, oracle, engine, tmp_path)


def test_dp_ranks_have_tiers_of_their_own(
    checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    side = {"parallel": {"dp": 2}, "dp_policy": "follow_room"}
    config = config_of((1, GATHER, 1), tmp_path)
    config = DeployConfig.model_validate({**config.model_dump(), "prefill": side, "decode": side})
    with engine.running(checkpoint, config) as cluster:
        ask_until(cluster, LONG, oracle, Tier.DEVICE, host=9 * PAGE_SIZE, storage=0)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)


def stored_parts(folder: Path) -> list[str]:
    """Which part of which replica wrote each stored page."""
    names = [path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return [name.partition(".")[2] for name in names if not name.startswith("cut.")]


def test_what_was_computed_outlives_every_process_and_serves_other_cuts(
    checkpoint: Path, oracle: Oracle, tmp_path: Path
) -> None:
    next_turn = [*LONG, *oracle.tokens(LONG), *draw(2, 5)]
    all_pages = 10 * PAGE_SIZE
    gather = config_of((2, GATHER, 1), tmp_path)
    ring = config_of((3, RING, 1), tmp_path)
    first = LocalEngine()
    try:
        with first.running(checkpoint, gather) as cluster:
            ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)
            attempts = 0
            while "cp0of1-tp0of1-pp0of1" not in stored_parts(tmp_path):
                assert (attempts := attempts + 1) < 50, "decode has stored nothing of what it generated"
                ask(cluster, LONG)
    finally:
        first.close()
    parts = Counter(stored_parts(tmp_path))
    assert sum(parts[f"cp{rank}of2-tp0of1-pp0of1"] for rank in range(2)) == 9, "a page is stored twice, or by decode"
    assert abs(parts["cp0of2-tp0of1-pp0of1"] - parts["cp1of2-tp0of1-pp0of1"]) <= 1, "ranks share the work unevenly"
    assert parts["cp0of1-tp0of1-pp0of1"] == 1
    second = LocalEngine()
    try:
        with second.running(checkpoint, ring) as cluster:
            answer = ask(cluster, next_turn)
    finally:
        second.close()
    assert answer.token_ids == oracle.tokens(next_turn)
    assert answer.cached == CachedTokens(total=all_pages, storage=all_pages)


def test_slow_and_failing_storage_fails_no_request_and_changes_no_token(
    checkpoint: Path, oracle: Oracle, tmp_path: Path
) -> None:
    storage = {"backend": "files", "folder": str(tmp_path), "prefetch_min_tokens": 1, "prefetch_base_s": 0.05}
    config = config_of((2, GATHER, 1), tmp_path, storage=storage)
    prompts = [[*draw(seed % 3, 4 * PAGE_SIZE), *draw(seed, 20)] for seed in range(10)]
    engine = LocalEngine("tests.fakes.faulty_storage:WorkerWithFaultyStorage")
    try:
        with engine.running(checkpoint, config) as cluster:
            for _ in range(2):
                answers = cluster.generate(asked(prompts, NUM_TOKENS), timeout_s=120)
                assert answers == [oracle.tokens(prompt) for prompt in prompts]
                cluster.flush(Tier.DEVICE, Tier.HOST)
    finally:
        engine.close()
