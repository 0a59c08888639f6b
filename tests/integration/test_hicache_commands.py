"""What an administrator wants of the tiers, over real workers: pinned prompts stay, and storage is left alone."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.ids import Role
from cluster.spec.kv import page_keys
from cluster.spec.strategy import CpMode
from cluster.spec.tiers import CachedTokens, PinPages, Tier
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import LocalCluster
from tests.fakes.local_engine import LocalEngine
from tests.integration.test_hicache import LONG, PAGE_SIZE, ask, config_of

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
