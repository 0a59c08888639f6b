"""Greedy fp32 tokens equal transformers' own for a model whose layers differ in what a token sees."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from tests.fakes.checkpoints import make_checkpoint
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
    engine = LocalEngine()
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
