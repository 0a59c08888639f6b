"""Mooncake Store under the storage backends' contract, and in a cluster."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.hicache_config import StorageConfig
from cluster.spec.tiers import Tier
from tests.fakes.local_engine import LocalEngine, Models
from tests.fakes.mooncake_master import mooncake_master
from tests.fakes.page_stores import RankStore, page_of, read_one, records_of, sizes, write_one
from tests.integration.test_hicache import LONG, NUM_TOKENS, PAGE_SIZE, ask_until
from workers.hicache.storage.interface import CorruptObjectError, StorageError, StorageObject
from workers.hicache.storage.registry import MAKERS, make_storage

pytestmark = [pytest.mark.integration, pytest.mark.mooncake]

WORKER = "tests.fakes.tier_workers:EagerWorker"
STALL_S = 1.5
"""Longest time without CPU for a thread that never waits, on a busy machine."""


@pytest.fixture
def master() -> Iterator[str]:
    with mooncake_master() as (address, _):
        yield address


def test_objects_are_complete_and_correct_or_absent(master: str) -> None:
    from workers.hicache.storage.mooncake_store import MooncakeStorage

    one, other = (MooncakeStorage("127.0.0.1", master) for _ in range(2))
    write_one(one, "n/a", [memoryview(b"abc"), memoryview(b"d")])
    write_one(other, "n/a", [memoryview(b"wxyz")])
    buffers = [memoryview(bytearray(1)), memoryview(bytearray(3))]
    assert read_one(other, "n/a", buffers)
    assert b"".join(map(bytes, buffers)) == b"abcd"
    assert other.present({"n/a": 0, "n/b": 0}) == ["n/a"]
    with pytest.raises(CorruptObjectError, match="has 4 bytes, expected 1"):
        read_one(one, "n/a", buffers[:1])
    assert one.write([StorageObject(name, [memoryview(name.encode())]) for name in ("n/c", "n/de")]) == [None] * 2
    wanted = [StorageObject(name, [memoryview(bytearray(3))]) for name in ("n/a", "n/b", "n/c", "n/de")]
    assert [outcome if isinstance(outcome, bool) else str(outcome) for outcome in other.read(wanted)] == [
        "n/a has 4 bytes, expected 3",
        *(False, True),
        "n/de has 4 bytes, expected 3",
    ]
    assert bytes(wanted[2].parts[0]) == b"n/c"
    pages = [page_of(number) for number in range(3)]
    store = RankStore(one, records_of(sizes())[0])
    assert store.write(pages) == RankStore(other, records_of(sizes())[0]).read(pages) == [True] * 3
    keyed = RankStore(MooncakeStorage("127.0.0.1", master, key=b"k" * 32), records_of(sizes())[0])
    assert keyed.read(pages) == [False] * 3, "names depend on the key"
    keyed.store.close()
    one.delete("n/a")
    one.delete("n/a")
    assert not read_one(other, "n/a", buffers)
    sizes_mib = 20, 20, 130, 1
    large = [StorageObject(f"n/{mib}-{number}", [memoryview(bytes(mib << 20))]) for number, mib in enumerate(sizes_mib)]
    errors = one.write(large)
    assert [error is None for error in errors] == [True, True, False, True]
    assert "n/130-2 cannot be written" in str(errors[2])
    assert other.present({item.name: item.depth for item in large}) == ["n/20-0", "n/20-1", "n/1-3"]
    one.close()
    other.close()


def seconds_of(*calls: Callable[[], object]) -> float:
    """Return the time until all of some concurrent calls have failed. Meanwhile, no other thread may be blocked."""

    def run(call: Callable[[], object]) -> None:
        with pytest.raises(StorageError):
            call()

    start_s = seen_s = time.monotonic()
    with ThreadPoolExecutor(len(calls)) as threads:
        failing = [threads.submit(run, call) for call in calls]
        while not all(each.done() for each in failing):
            time.sleep(0.01)
            now_s = time.monotonic()
            assert now_s - seen_s < STALL_S, "the call holds everybody up"
            seen_s = now_s
    for each in failing:
        each.result()
    return seen_s - start_s


def stop(pid: int) -> None:
    """Stop a process. Return once all its threads have stopped, because they respond until then."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def test_a_silent_master_is_unavailable(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.hicache.storage.mooncake_store._REACH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        config = StorageConfig.model_validate({"backend": "mooncake_store", "master": address})
        assert seconds_of(lambda: MAKERS[config.backend](config, "127.0.0.1")) < 10.0
        assert make_storage(config, "127.0.0.1") is not None
        assert "starting without storage: the Mooncake master at" in caplog.text


def test_a_silent_master_delays_no_call_for_long_and_is_used_once_it_responds() -> None:
    from workers.hicache.storage.mooncake_store import MooncakeStorage

    with mooncake_master() as (address, process):
        storage = MooncakeStorage("127.0.0.1", address)
        write_one(storage, "n/a", [memoryview(b"abc")])
        stop(process.pid)
        try:
            seconds = seconds_of(
                lambda: storage.present({"n/a": 0}),
                lambda: write_one(storage, "n/b", [memoryview(b"abc")]),
                lambda: read_one(storage, "n/b", [memoryview(bytearray(3))]),
                lambda: storage.delete("n/b"),
            )
            assert seconds < 10.0
        finally:
            process.send_signal(signal.SIGCONT)
        assert storage.present({"n/a": 0}) == ["n/a"]
        storage.close()


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_a_prompt_is_loaded_from_the_store(
    family: str, master: str, models: Models, engine: LocalEngine, tmp_path: Path
) -> None:
    folder = models.folder(family)
    storage = {"backend": "mooncake_store", "master": master, "folder": str(tmp_path), "prefetch": "wait_complete"}
    config = DeployConfig.model_validate(
        {
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "prefill": {"parallel": {"cp": 2}},
            "hicache": {"host_gib": 0.01, "storage": storage},
        }
    )
    with engine.running(folder, config) as cluster:
        oracle = models.oracle(folder, NUM_TOKENS)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)
    assert [path.name for path in tmp_path.iterdir()] == [".key"]
