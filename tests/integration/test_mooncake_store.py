"""Mooncake Store under the contract of storage backends, and under a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.tiers import Tier
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_engine import LocalEngine, Oracle
from tests.fakes.mooncake_master import mooncake_master
from tests.fakes.page_stores import RankStore, page_of, rows_of, sizes
from tests.integration.test_hicache import LONG, NUM_TOKENS, PAGE_SIZE, ask_until
from workers.hicache.storage.interface import CorruptObjectError, StorageError

pytestmark = [pytest.mark.integration, pytest.mark.mooncake]


@pytest.fixture
def master() -> Iterator[str]:
    with mooncake_master() as (address, _):
        yield address


def test_objects_are_whole_and_right_or_not_there(master: str) -> None:
    from workers.hicache.storage.mooncake_store import MooncakeStorage

    one, other = (MooncakeStorage("127.0.0.1", master, 0) for _ in range(2))
    one.write("n/a", [memoryview(b"abc"), memoryview(b"d")])
    other.write("n/a", [memoryview(b"wxyz")])
    buffers = [memoryview(bytearray(1)), memoryview(bytearray(3))]
    assert other.read("n/a", buffers)
    assert b"".join(map(bytes, buffers)) == b"abcd"
    assert other.count_leading(["n/a", "n/b", "n/a"]) == 1
    with pytest.raises(CorruptObjectError, match="has 4 bytes, not 1"):
        one.read("n/a", buffers[:1])
    pages = [page_of(number) for number in range(3)]
    store = RankStore(one, rows_of(sizes())[0])
    assert store.write(pages) == RankStore(other, rows_of(sizes())[0]).read(pages) == [True] * 3
    one.delete("n/a")
    one.delete("n/a")
    assert not other.read("n/a", buffers)
    with pytest.raises(StorageError, match="cannot be written"):
        one.write("n/large", [memoryview(bytes(130 << 20))])
    one.close()
    other.close()


def test_a_prompt_comes_back_from_the_store(master: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama", seed=11)
    oracle = Oracle(folder, NUM_TOKENS)
    storage = {"backend": "mooncake_store", "master": master, "prefetch": "wait_complete", "prefetch_min_tokens": 1}
    config = DeployConfig.model_validate(
        {
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "prefill": {"parallel": {"cp": 2}},
            "hicache": {"host_gib": 0.01, "storage": storage},
        }
    )
    engine = LocalEngine()
    try:
        with engine.running(folder, config) as cluster:
            ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)
    finally:
        engine.close()
