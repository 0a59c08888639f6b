"""Greedy fp32 tokens equal transformers' own whichever tiers hold a prompt, and the answer says which did."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.strategy import CpMode
from cluster.spec.tiers import Tier
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_engine import LocalEngine, Oracle, asked
from tests.fakes.pairwise import Case, all_pairs
from workers.local import Answer, LocalCluster

pytestmark = pytest.mark.integration

PAGE_SIZE = 16
NUM_TOKENS = 20
FACTORS: dict[str, list[Any]] = {
    "cp": [1, 2, 3, 4],
    "mode": list(CpMode),
    "tp": [1, 2],
    "tiers": ["host", "storage", "host and storage"],
}


def draw(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


LONG = draw(1, 9 * PAGE_SIZE + 3)
HALF = LONG[: 4 * PAGE_SIZE + 1]


def config_of(case: Case, folder: Path, **hicache: Any) -> DeployConfig:
    parallel = {"cp": case["cp"], "tp": case["tp"]}
    storage = {"backend": "files", "folder": str(folder), "prefetch_min_tokens": 1, "prefetch": "wait_complete"}
    return DeployConfig.model_validate(
        {
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "prefill": {"parallel": parallel, "mode": case["mode"], "chunk_tokens": 50},
            "decode": {"parallel": {"tp": case["tp"]}},
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


@pytest.mark.parametrize(
    "case", sorted(all_pairs(FACTORS), key=lambda case: (case["cp"], case["mode"], case["tp"])), ids=str
)
def test_tokens_do_not_depend_on_the_tier_that_has_a_prompt(
    case: Case, checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    config = config_of(case, tmp_path)
    all_pages, half_pages = 9 * PAGE_SIZE, 4 * PAGE_SIZE
    with engine.running(checkpoint, config) as cluster:
        assert ask(cluster, LONG).token_ids == oracle.tokens(LONG)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, host=all_pages, storage=0)
        if case["tiers"] == "storage":
            ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=all_pages)
        elif case["tiers"] == "host and storage":
            ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=all_pages)
            ask_until(cluster, HALF, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=half_pages)
            ask_until(cluster, LONG, oracle, Tier.DEVICE, host=half_pages, storage=all_pages - half_pages)
