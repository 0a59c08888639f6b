"""Greedy fp32 tokens equal transformers' own for a model whose layers differ in what a token sees."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.tiers import CachedTokens, Tier
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import LocalCluster
from tests.fakes.local_engine import LocalEngine, Oracle, asked

PAGE_SIZE, WINDOW, NUM_TOKENS = 8, 21, 40
LENGTHS = (1, 20, 90, 203)
CLUSTERS: dict[str, dict[str, Any]] = {
    "cp": {"prefill": {"parallel": {"cp": 2}, "strategy": "zigzag", "chunk_tokens": 37}},
    "interleave": {"prefill": {"parallel": {"cp": 3}, "strategy": "interleave", "chunk_tokens": 4096}},
    "tp and pp": {
        "prefill": {"parallel": {"tp": 2}, "chunk_tokens": 16},
        "decode": {"parallel": {"pp": 2}},
        "transfer": {"verify": "digest"},
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers; the first sees everything, the others a window of less than three pages."""
    root = tmp_path_factory.mktemp("windows")
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return make_checkpoint(root / "qwen3", "qwen3", seed=7, num_hidden_layers=4, **windows)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint, NUM_TOKENS)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine("tests.fakes.eager_worker:EagerWorker")
    yield engine
    engine.close()


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS.keys())
def test_tokens_are_the_oracles_computed_and_cached(
    cluster: dict[str, Any], checkpoint: Path, oracle: Oracle, engine: LocalEngine
) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in LENGTHS]
    theirs = [oracle.tokens(prompt) for prompt in prompts]
    config = {"model": {"served_name": "qwen3"}, "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01}} | cluster
    with engine.running(checkpoint, DeployConfig.model_validate(config)) as local:
        for _ in range(2):
            assert local.generate(asked(prompts, NUM_TOKENS), timeout_s=120) == theirs


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS.keys())
def test_a_prefix_comes_from_host_memory_and_in_new_processes_from_storage(
    cluster: dict[str, Any], checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    rng = random.Random(4)
    prompt = [rng.randrange(3, 250) for _ in range(9 * PAGE_SIZE + 3)]
    storage = {"backend": "files", "folder": str(tmp_path), "prefetch": "wait_complete"}
    config = DeployConfig.model_validate(
        {
            "model": {"served_name": "qwen3"},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "hicache": {"host_gib": 0.01, "storage": storage},
            **cluster,
        }
    )
    num_cached = 9 * PAGE_SIZE
    with engine.running(checkpoint, config) as local:
        ask_until(local, prompt, oracle, CachedTokens(total=num_cached, host=num_cached), Tier.DEVICE)
        ask_until(local, prompt, oracle, CachedTokens(total=num_cached, storage=num_cached), Tier.DEVICE, Tier.HOST)
    engine.restart()
    with engine.running(checkpoint, config) as local:
        ask_until(local, prompt, oracle, CachedTokens(total=num_cached, storage=num_cached))


def ask_until(cluster: LocalCluster, prompt: list[int], oracle: Oracle, wanted: CachedTokens, *flushed: Tier) -> None:
    """Ask until the prompt is cached as wanted; copies are made beside the work. All answers must be right."""
    for _ in range(50):
        cluster.flush(*flushed)
        (answer,) = cluster.answer(asked([prompt], NUM_TOKENS), timeout_s=120)
        assert answer.token_ids == oracle.tokens(prompt)
        if answer.cached == wanted:
            return
        if not flushed:
            break
    raise AssertionError(f"never {wanted}, at last {answer.cached}")
