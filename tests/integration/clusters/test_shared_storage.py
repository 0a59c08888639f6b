"""Two prefill replicas of a real cluster over one folder: what one has computed the other reads, each rank its half."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.spec.tiers import TierJobKind
from tests.fakes.cluster import RunningCluster, running_cluster
from tests.fakes.recall_prompts import chain_prompt, recall_oracle
from workers.hicache.storage.page_store import HEADER_BYTES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_PAGES = 40
PAGE_SIZE = 64
PROMPT = chain_prompt(NUM_PAGES * PAGE_SIZE + 1, PAGE_SIZE)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    settings = {
        "prefill.replicas": 2,
        "kv.memory_gib": 0.05,
        "hicache.host_gib": 0.05,
        "hicache.storage.backend": "files",
        "hicache.storage.folder": tmp_path,
        "hicache.storage.prefetch": "wait_complete",
        "router.prefill_policy": "round_robin",
        "resources.cpus_per_worker": 0.25,
    }
    changes = [f"{key}={value}" for key, value in settings.items()]
    with running_cluster("deploy/local-cpu.yaml", "test-shared-storage", *changes) as running:
        yield running


@pytest.mark.full
def test_what_waits_to_be_stored_is_stored_before_a_cluster_ends(tmp_path: Path) -> None:
    settings = {
        "kv.memory_gib": 0.05,
        "hicache.host_gib": 0.05,
        "hicache.storage.backend": "files",
        "hicache.storage.folder": tmp_path,
        "resources.cpus_per_worker": 0.25,
    }
    changes = [f"{key}={value}" for key, value in settings.items()]
    with running_cluster("deploy/local-cpu.yaml", "test-stored-at-end", *changes) as cluster:
        assert ask(cluster) == {"cached_tokens": 0}
    assert len(stored_bytes(tmp_path)) == NUM_PAGES


def test_what_only_the_device_has_is_stored_before_a_cluster_ends(tmp_path: Path) -> None:
    settings = {
        "kv.memory_gib": 0.05,
        "hicache.host_gib": 0.00125,  # for 10 pages of the 20 that each rank computes
        "hicache.write": "write_back",
        "hicache.storage.prefetch": "wait_complete",
        "hicache.storage.backend": "files",
        "hicache.storage.folder": tmp_path,
        "resources.cpus_per_worker": 0.25,
    }
    changes = [f"{key}={value}" for key, value in settings.items()]
    with running_cluster("deploy/local-cpu.yaml", "test-device-at-end", *changes) as cluster:
        assert ask(cluster) == {"cached_tokens": 0}
        assert len(stored_keys(tmp_path)) < NUM_PAGES
    assert len(stored_keys(tmp_path)) == NUM_PAGES
    with running_cluster("deploy/local-cpu.yaml", "test-device-at-end", *changes) as cluster:
        details = ask(cluster)
    assert 0 < details["cached_tokens"] == details["storage_tokens"] < NUM_PAGES * PAGE_SIZE, (
        "more than host memory has room for"
    )


def ask(cluster: RunningCluster) -> dict[str, int]:
    """Where the prompt's pages came from; the answer leads through every one of them."""
    body = {"model": "recall", "prompt": PROMPT, "max_tokens": NUM_PAGES, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    assert answer["choices"][0]["token_ids"] == recall_oracle(PROMPT, NUM_PAGES)
    details: dict[str, int] = answer["usage"]["prompt_tokens_details"]
    return details


def stored_keys(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.rglob("*.h*") if not path.name.startswith(".")}


def stored_bytes(folder: Path) -> list[int]:
    """Return the size of every stored page, without its header."""
    files = [path for path in folder.rglob("*.h*") if not path.name.startswith(".")]
    return [path.stat().st_size - HEADER_BYTES for path in files]


def moved(
    cluster: RunningCluster, kind: TierJobKind, name: str = "baton_tier_bytes_total"
) -> dict[tuple[str, str], int]:
    """By replica and CP rank, of those that moved something."""
    families = text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {
        (sample.labels["replica"], sample.labels["cp_rank"]): int(sample.value)
        for sample in samples
        if sample.labels["kind"] == kind and sample.value and sample.labels["replica"].startswith("prefill")
    }


def test_what_one_replica_has_computed_the_other_reads(cluster: RunningCluster, tmp_path: Path) -> None:
    cluster.wait_until(lambda: [entry["ready"] for entry in cluster.replicas().values()] == [True] * 3, 60)
    assert ask(cluster) == {"cached_tokens": 0}
    cluster.wait_until(lambda: len(stored_bytes(tmp_path)) == NUM_PAGES, 60)
    page_bytes = stored_bytes(tmp_path)[0]
    assert ask(cluster) == {"cached_tokens": NUM_PAGES * PAGE_SIZE, "storage_tokens": NUM_PAGES * PAGE_SIZE}
    half = NUM_PAGES // 2 * page_bytes

    def halves(kind: TierJobKind) -> bool:
        return list(moved(cluster, kind).values()) == [half, half]

    cluster.wait_until(lambda: halves(TierJobKind.STORE) and halves(TierJobKind.FETCH), 60)
    stored, fetched = (moved(cluster, kind) for kind in (TierJobKind.STORE, TierJobKind.FETCH))
    assert {replica for replica, _ in stored}.isdisjoint(replica for replica, _ in fetched)
    hits = moved(cluster, TierJobKind.FETCH, "baton_tier_tokens_total")
    assert hits == dict.fromkeys(fetched, NUM_PAGES // 2 * PAGE_SIZE)
    assert moved(cluster, TierJobKind.FETCH, "baton_tier_job_seconds_count").keys() == fetched.keys()
    assert not moved(cluster, TierJobKind.FETCH, "baton_tier_open_jobs")
    assert stored_bytes(tmp_path) == [page_bytes] * NUM_PAGES, "a page is stored twice"
