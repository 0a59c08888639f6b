"""Greedy fp32 tokens equal transformers' for models with windows in all layers or in some."""

from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.tiers import CachedTokens, Tier
from tests.fakes.local_cluster import LocalCluster
from tests.fakes.local_engine import LocalEngine, Models, Oracle, asked, prompts_of

pytestmark = pytest.mark.integration

WORKER = "tests.fakes.tier_workers:EagerWorker"
PAGE_SIZE, WINDOW, NUM_TOKENS = 8, 21, 40
CLUSTERS: dict[str, dict[str, Any]] = {
    "cp": {"prefill": {"parallel": {"cp": 2}, "strategy": "zigzag", "chunk_tokens": 37}},
    "interleave": {"prefill": {"parallel": {"cp": 3}, "strategy": "interleave", "chunk_tokens": 4096}},
    "tp and pp": {
        "prefill": {"parallel": {"tp": 2}, "chunk_tokens": 16},
        "decode": {"parallel": {"pp": 2}},
        "transfer": {"verify": "digest"},
    },
}

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {}),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("mixtral", {}),
    ("qwen2_moe", {"use_sliding_window": True, "num_hidden_layers": 3}),
    ("qwen3_moe", {"use_sliding_window": True}),
]
"""Families whose windows are in every layer, or in every other one, with what their configurations need."""


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Path:
    """Return four layers. The first has full attention, and the others have a window of less than three pages."""
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return models.folder("qwen3", num_hidden_layers=4, **windows)


@pytest.fixture(scope="module")
def oracle(models: Models, checkpoint: Path) -> Oracle:
    return models.oracle(checkpoint, NUM_TOKENS)


def config_of(cluster: dict[str, Any], **hicache: object) -> DeployConfig:
    kv = {"page_size": PAGE_SIZE, "memory_gib": 0.01}
    return DeployConfig.model_validate({"model": {"served_name": "qwen3"}, "kv": kv, "hicache": hicache, **cluster})


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS.keys())
def test_tokens_equal_the_oracles_computed_and_cached(
    cluster: dict[str, Any], checkpoint: Path, oracle: Oracle, engine: LocalEngine
) -> None:
    prompts = prompts_of((1, 20, 90, 203))
    theirs = [oracle.tokens(prompt) for prompt in prompts]
    with engine.running(checkpoint, config_of(cluster)) as local:
        for _ in range(2):
            assert local.generate(asked(prompts, NUM_TOKENS), timeout_s=120) == theirs


@pytest.mark.parametrize(("family", "windows"), FAMILIES, ids=str)
def test_tokens_of_every_family_equal_the_oracles(
    models: Models, engine: LocalEngine, family: str, windows: dict[str, Any]
) -> None:
    checkpoint = models.folder(family, sliding_window=WINDOW, **windows)
    prompts = prompts_of((1, 90, 203))
    oracle = models.oracle(checkpoint, NUM_TOKENS)
    with engine.running(checkpoint, config_of(CLUSTERS["cp"])) as local:
        assert local.generate(asked(prompts, NUM_TOKENS), timeout_s=120) == list(map(oracle.tokens, prompts))


def test_a_prefix_is_loaded_from_host_memory_and_in_new_processes_from_storage(
    checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    (prompt,) = prompts_of((9 * PAGE_SIZE + 3,))
    in_host, stored = (CachedTokens(total=9 * PAGE_SIZE, **{tier: 9 * PAGE_SIZE}) for tier in ("host", "storage"))
    configs = []
    for name, cluster in CLUSTERS.items():
        storage = {"backend": "files", "folder": str(tmp_path / name), "prefetch": "wait_complete"}
        configs.append(config_of(cluster, host_gib=0.01, storage=storage))
        with engine.running(checkpoint, configs[-1]) as local:
            ask_until(local, prompt, oracle, in_host, Tier.DEVICE)
            ask_until(local, prompt, oracle, stored, Tier.DEVICE, Tier.HOST)
    engine.restart()
    for config in configs:
        with engine.running(checkpoint, config) as local:
            ask_until(local, prompt, oracle, stored)


def ask_until(cluster: LocalCluster, prompt: list[int], oracle: Oracle, wanted: CachedTokens, *flushed: Tier) -> None:
    """Ask until the prompt is cached as expected. Copies are asynchronous. All answers must be right."""
    for _ in range(50):
        cluster.flush(*flushed)
        (answer,) = cluster.answer(asked([prompt], NUM_TOKENS), timeout_s=120)
        assert answer.token_ids == oracle.tokens(prompt)
        if answer.cached == wanted:
            return
        if not flushed:
            break
    raise AssertionError(f"never {wanted}, at last {answer.cached}")
