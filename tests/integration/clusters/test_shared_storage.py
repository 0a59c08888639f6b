"""Replicas of real clusters with one storage folder: one reads what another has computed, and each rank its half."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.spec.tiers import TierJobKind
from tests.fakes.cluster import RunningCluster, running_cluster
from tests.fakes.cluster_ends import kill_its_raylet, signal_its_group
from tests.fakes.recall_prompts import chain_prompt, recall_oracle
from workers.hicache.storage.page_store import HEADER_BYTES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_PAGES = 40
PAGE_SIZE = 64
PROMPT, OTHER = (chain_prompt(NUM_PAGES * PAGE_SIZE + 1, PAGE_SIZE, seed=seed) for seed in range(2))


def settings_of(folder: Path, **changes: object) -> list[str]:
    settings = {
        "kv.memory_gib": 0.05,
        "hicache.host_gib": 0.05,
        "hicache.storage.backend": "files",
        "hicache.storage.folder": folder,
        "hicache.storage.prefetch": "wait_complete",
        "resources.cpus_per_worker": 0.25,
    }
    return [f"{key}={value}" for key, value in {**settings, **changes}.items()]


def ask(cluster: RunningCluster, prompt: list[int]) -> dict[str, int]:
    """Return the sources of the prompt's pages. The answer depends on every one of them."""
    body = {"model": "recall", "prompt": prompt, "max_tokens": NUM_PAGES, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    assert answer["choices"][0]["token_ids"] == recall_oracle(prompt, NUM_PAGES)
    details: dict[str, int] = answer["usage"]["prompt_tokens_details"]
    return details


def stored_bytes(folder: Path) -> list[int]:
    """Return the size of every stored page without its header."""
    files = [path for path in folder.rglob("*.h*") if not path.name.startswith(".")]
    return [path.stat().st_size - HEADER_BYTES for path in files]


def moved(
    cluster: RunningCluster, kind: TierJobKind, name: str = "baton_tier_bytes_total"
) -> dict[tuple[str, str], int]:
    """Return the tier traffic by replica and CP rank, without zeros."""
    families = text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {
        (sample.labels["replica"], sample.labels["cp_rank"]): int(sample.value)
        for sample in samples
        if sample.labels["kind"] == kind and sample.value and sample.labels["replica"].startswith("prefill")
    }


def test_replicas_read_what_others_have_stored_even_after_their_end(tmp_path: Path) -> None:
    """Pages that only the device has are stored before a cluster stops. Host memory has room for half of them."""
    changes = {"hicache.host_gib": 0.0025, "hicache.write": "write_back", "prefill.parallel.cp": 1}
    small = settings_of(tmp_path, **changes)
    with running_cluster("deploy/local-cpu.yaml", "test-device-at-end", *small, end=signal_its_group) as cluster:
        assert ask(cluster, PROMPT) == {"cached_tokens": 0}
        assert len(stored_bytes(tmp_path)) < NUM_PAGES
    assert len(stored_bytes(tmp_path)) == NUM_PAGES
    two = settings_of(tmp_path, **{"prefill.replicas": 2, "router.prefill_policy": "round_robin"})
    with running_cluster("deploy/local-cpu.yaml", "test-shared-storage", *two, end=kill_its_raylet) as cluster:
        check_sharing(cluster, tmp_path)


def check_sharing(cluster: RunningCluster, folder: Path) -> None:
    """Check that the first replica reads a stored prompt, and then one that the second has computed."""
    from_storage = {"cached_tokens": NUM_PAGES * PAGE_SIZE, "storage_tokens": NUM_PAGES * PAGE_SIZE}
    cluster.wait_until(lambda: [entry["ready"] for entry in cluster.replicas().values()] == [True] * 3, 60)
    assert ask(cluster, PROMPT) == from_storage
    assert ask(cluster, OTHER) == {"cached_tokens": 0}
    cluster.wait_until(lambda: len(stored_bytes(folder)) == 2 * NUM_PAGES, 60)
    assert ask(cluster, OTHER) == from_storage
    page_bytes = stored_bytes(folder)[0]
    half = NUM_PAGES // 2 * page_bytes

    def is_counted() -> bool:
        stored, fetched = (list(moved(cluster, kind).values()) for kind in (TierJobKind.STORE, TierJobKind.FETCH))
        return (stored, fetched) == ([half, half], [2 * half, 2 * half])

    cluster.wait_until(is_counted, 60)
    stored, fetched = (moved(cluster, kind) for kind in (TierJobKind.STORE, TierJobKind.FETCH))
    assert {replica for replica, _ in stored}.isdisjoint(replica for replica, _ in fetched)
    hits = moved(cluster, TierJobKind.FETCH, "baton_tier_tokens_total")
    assert hits == dict.fromkeys(fetched, NUM_PAGES * PAGE_SIZE)
    found = moved(cluster, TierJobKind.LOOK_UP, "baton_tier_tokens_total")
    assert {rank: found[rank] for rank in hits} == hits
    assert moved(cluster, TierJobKind.FETCH, "baton_tier_job_seconds_count").keys() == fetched.keys()
    assert not moved(cluster, TierJobKind.FETCH, "baton_tier_open_jobs")
    assert stored_bytes(folder) == [page_bytes] * 2 * NUM_PAGES, "a page is stored twice"
