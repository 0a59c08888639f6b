"""What an administrator wants of the tiers, over real workers: pinned prompts stay, and storage is left alone."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Drain
from cluster.spec.page_key import page_keys
from cluster.spec.strategy import CpMode
from cluster.spec.tiers import CachedTokens, PinPages, Tier, UseStorage
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import LocalCluster
from tests.fakes.local_engine import LocalEngine
from tests.integration.test_hicache import LONG, PAGE_SIZE, ask, config_of, stored_by

pytestmark = pytest.mark.integration

WAY = (2, CpMode.GATHER, 1)
KEYS = page_keys(LONG, PAGE_SIZE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", seed=11)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    engine.close()


def pin(cluster: LocalCluster, *, is_pinned: bool = True) -> int:
    answer = cluster.tell(Role.PREFILL, PinPages(keys=KEYS, is_pinned=is_pinned), timeout_s=60)
    assert not answer.refusal
    return answer.num_pinned


def num_prompt_pages(folder: Path) -> int:
    """Count the pages that prefill, which has two CP ranks, has stored."""
    return sum("of2-tp" in writer for writer in stored_by(folder))


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_BACK])
def test_a_prompt_that_is_pinned_before_it_is_computed_is_found_in_host_memory_after_a_flush(
    policy: WritePolicy, checkpoint: Path, engine: LocalEngine, tmp_path: Path
) -> None:
    all_tokens = len(KEYS) * PAGE_SIZE
    with engine.running(checkpoint, config_of(WAY, tmp_path, write=policy, storage={"backend": "none"})) as cluster:
        assert pin(cluster) == 0
        first = ask(cluster, LONG)
        deadline_s = time.monotonic() + 60
        while pin(cluster) < len(KEYS):
            assert time.monotonic() < deadline_s, "the pinned prompt was not copied to host memory"
            time.sleep(0.01)
        cluster.flush(Tier.DEVICE, Tier.HOST)
        again = ask(cluster, LONG)
        assert (again.token_ids, again.cached) == (first.token_ids, CachedTokens(total=all_tokens, host=all_tokens))
        assert pin(cluster, is_pinned=False) == 0
        cluster.flush(Tier.DEVICE, Tier.HOST)
        assert ask(cluster, LONG).cached.total == 0


def test_storage_is_left_alone_while_it_is_detached_and_given_what_it_missed_then(
    checkpoint: Path, engine: LocalEngine, tmp_path: Path
) -> None:
    with engine.running(checkpoint, config_of(WAY, tmp_path)) as cluster:
        for role in Role:
            assert not cluster.tell(role, UseStorage(is_attached=False), timeout_s=60).refusal
        for _ in range(3):
            ask(cluster, LONG)
        time.sleep(0.5)
        assert stored_by(tmp_path) == []
        for role in Role:
            cluster.tell(role, UseStorage(is_attached=True), timeout_s=60)
        deadline_s = time.monotonic() + 60
        while len(stored_by(tmp_path)) < len(KEYS):
            assert time.monotonic() < deadline_s, "nothing was stored after storage was attached again"
            ask(cluster, LONG)


def test_a_replica_that_drains_stores_again_what_was_lost(
    checkpoint: Path, engine: LocalEngine, tmp_path: Path
) -> None:
    config = config_of(WAY, tmp_path)
    with engine.running(checkpoint, config) as cluster:
        for is_draining in (False, True):
            for _ in range(3):
                ask(cluster, LONG)
            if is_draining:
                cluster.tell(Role.PREFILL, Drain(), timeout_s=60)
            deadline_s = time.monotonic() + 60
            while num_prompt_pages(tmp_path) < len(KEYS):
                assert time.monotonic() < deadline_s, f"not everything was stored, draining: {is_draining}"
                time.sleep(0.01)
            if not is_draining:
                for path in filter(Path.is_dir, list(tmp_path.iterdir())):
                    shutil.rmtree(path)
    engine.restart()
    with engine.running(checkpoint, config) as cluster:
        assert ask(cluster, LONG).cached.storage == len(KEYS) * PAGE_SIZE


def test_without_tiers_a_replica_says_what_is_not_configured(
    checkpoint: Path, engine: LocalEngine, tmp_path: Path
) -> None:
    storage = {"backend": "none"}
    with engine.running(checkpoint, config_of(WAY, tmp_path, host_gib=0.0, storage=storage)) as cluster:
        for wanted in (PinPages(keys=KEYS, is_pinned=True), UseStorage(is_attached=False)):
            refusal = cluster.tell(Role.PREFILL, wanted, timeout_s=60).refusal
            assert refusal == "no host memory is configured for cached pages (hicache.host_gib)"
