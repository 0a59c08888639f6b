"""Slow storage receives few queries, and neither requests nor the end of a worker wait for it."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.spec.errors import PeerLostError, TransferError
from cluster.spec.tiers import TierJob, TierJobKind, TierJobResult
from tests.fakes.page_stores import RankStore, page_of, records_of, sizes
from workers.hicache import tier_worker
from workers.hicache.storage import page_store
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import Read, StorageError, StorageObject, Written

PAGES = [page_of(number) for number in range(4)]


class CountingStorage(FileStorage):
    """Storage whose slow queries are counted."""

    delay_s = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 20)
        self.asked = Counter[str]()

    def present(self, depths: Mapping[str, int]) -> list[str]:
        self._take("present")
        return super().present(depths)

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        self._take("read")
        return super().read(objects)

    def write(self, objects: Sequence[StorageObject]) -> list[Written]:
        self._take("write")
        return super().write(objects)

    def _take(self, question: str) -> None:
        self.asked[question] += 1
        time.sleep(self.delay_s)


def test_a_look_up_asks_once(tmp_path: Path) -> None:
    backend = CountingStorage(tmp_path)
    store = RankStore(backend, records_of(sizes())[0])
    store.write(PAGES[:2])
    backend.asked.clear()
    assert store.look_up(PAGES) == [True, True, False, False]
    assert backend.asked == {"present": 1}


def test_pages_are_read_and_written_in_one_call(tmp_path: Path) -> None:
    backend = CountingStorage(tmp_path)
    store = RankStore(backend, records_of(sizes())[0])
    assert store.write(PAGES[:1]) == [True]
    backend.asked.clear()
    assert store.write(PAGES) == [True] * 4
    assert backend.asked == {"present": 1, "write": 1}
    backend.asked.clear()
    assert store.read(PAGES) == [True] * 4
    assert backend.asked == {"read": 1}


def test_failing_calls_fail_their_pages_and_none_begins_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FileStorage):
        num_calls = 0

        def read(self, objects: Sequence[StorageObject]) -> list[Read]:
            self.num_calls += 1
            if self.num_calls == 2:
                raise StorageError("the disk is away")
            time.sleep(0.05 * (self.num_calls == 3))
            return super().read(objects)

    monkeypatch.setattr(page_store, "_BATCH_PAGES", 1)
    backend = Failing(tmp_path, 1 << 20)
    store = RankStore(backend, records_of(sizes())[0])
    store.write(PAGES)
    assert store.read(PAGES) == [True, False, True, True]
    assert store.failures == {"error": 1}
    backend.num_calls = 2
    done = store.store.fetch(PAGES, store.buffer, time.monotonic() + 0.04, store.failures)
    assert (done, backend.num_calls) == ([True, False, False, False], 3)
    assert store.failures == {"error": 1, "late": 3}


def test_no_query_is_sent_after_the_deadline_or_at_shutdown(tmp_path: Path) -> None:
    backend = CountingStorage(tmp_path)
    store = RankStore(backend, records_of(sizes())[0])
    store.write(PAGES)
    backend.asked.clear()
    assert store.store.look_up(PAGES, time.monotonic() - 1.0, store.failures) == [False] * 4
    store.store.stop()
    assert store.look_up(PAGES) == [False] * 4
    assert not backend.asked
    assert store.failures["late"] == 8


def test_a_look_up_ends_with_its_current_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_store, "_LOOK_UP_PAGES", 2)
    backend = CountingStorage(tmp_path)
    store = RankStore(backend, records_of(sizes())[0])
    store.write(PAGES)
    backend.asked.clear()
    backend.delay_s = 0.05
    assert store.store.look_up(PAGES, time.monotonic() + 0.01, store.failures) == [True, True, False, False]
    assert backend.asked == {"present": 1}


class FakeOutbox:
    def send(self, address: str, message: object) -> None: ...

    def close(self) -> None: ...


class FakeCopier:
    def bytes_of(self, page: object) -> int:  # noqa: ARG002 - as a copier's
        return 1

    def owns(self, page: object) -> bool:  # noqa: ARG002 - as a copier's
        return True

    def host_page(self, page: object) -> memoryview:  # noqa: ARG002 - as a copier's
        return memoryview(bytearray(1))


class ReportingOutbox(FakeOutbox):
    """Outbox that records messages."""

    def __init__(self) -> None:
        self.sent = queue.SimpleQueue[TierJobResult]()

    def send(self, address: str, message: object) -> None:  # noqa: ARG002 - as an outbox's
        assert isinstance(message, TierJobResult)
        self.sent.put(message)


def test_jobs_queued_after_a_hanging_one_time_out() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Store:
        def fetch(self, pages: Sequence[object], *_: object) -> list[bool]:
            entered.set()
            assert go_on.wait(10.0)
            return [True] * len(pages)

        def figures(self) -> None: ...

        def stop(self) -> None: ...

        def close(self) -> None: ...

    outbox = ReportingOutbox()
    worker = tier_worker.TierWorker(
        cast(Any, FakeCopier()), cast(Any, Store()), 3, "leader", lambda: cast(Any, outbox), list[Exception]().append
    )
    worker.submit(TierJob(job_id=0, kind=TierJobKind.FETCH, pages=PAGES, timeout_s=0.0))
    assert entered.wait(10.0)
    for number, timeout_s in ((1, 60.0), (2, 0.02), (3, 0.01)):
        worker.submit(TierJob(job_id=number, kind=TierJobKind.FETCH, pages=PAGES[:number], timeout_s=timeout_s))
    refused = {answer.job_id: answer for answer in (outbox.sent.get(timeout=10.0) for _ in range(2))}
    assert (refused[2].waited_s, refused[3].waited_s) == (0.02, 0.01)
    assert {number: (answer.done, answer.failures) for number, answer in refused.items()} == {
        2: ([False] * 2, {"late": 2}),
        3: ([False] * 3, {"late": 3}),
    }
    assert outbox.sent.empty(), "pages that may still be written to are given back"
    go_on.set()
    late, last = (outbox.sent.get(timeout=10.0) for _ in range(2))
    assert [(answer.job_id, answer.done) for answer in (late, last)] == [(0, [True] * 4), (1, [True])]
    assert late.waited_s < late.busy_s
    assert last.waited_s > last.busy_s
    worker.close()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_worker_ends_though_storage_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, hangs: bool
) -> None:
    entered, go_on, calls = threading.Event(), threading.Event(), list[str]()

    class Store:
        def store(self, pages: Sequence[object], *_: object) -> list[bool]:
            calls.append("store")
            entered.set()
            assert go_on.wait(10.0)
            return [True] * len(pages)

        def figures(self) -> None: ...

        def stop(self) -> None:
            calls.append("stop")

        def close(self) -> None:
            calls.append("close")

    monkeypatch.setattr(tier_worker, "CLOSE_S", 0.05 if hangs else 10.0)
    worker = tier_worker.TierWorker(
        cast(Any, FakeCopier()), cast(Any, Store()), 0, "leader", cast(Any, FakeOutbox), list[Exception]().append
    )
    for number in range(3):
        worker.submit(TierJob(job_id=number, kind=TierJobKind.STORE, pages=PAGES, timeout_s=1.0))
    assert entered.wait(10.0)
    if not hangs:
        threading.Timer(0.05, go_on.set).start()
    worker.close()
    go_on.set()
    assert calls == ["store", "stop", *([] if hangs else ["close"])]
    assert ("gave up on unfinished tier jobs after 0.05 s: writes" in caplog.text) is hangs


def test_an_error_outside_a_job_ends_the_rank() -> None:
    class Store:
        def store(self, pages: Sequence[object], *_: object) -> list[bool]:
            return [True] * len(pages)

        def figures(self) -> None:
            raise RuntimeError("a bug")

        def stop(self) -> None: ...

        def close(self) -> None: ...

    failures = queue.SimpleQueue[Exception]()
    worker = tier_worker.TierWorker(
        cast(Any, FakeCopier()), cast(Any, Store()), 0, "leader", cast(Any, FakeOutbox), failures.put
    )
    worker.submit(TierJob(job_id=0, kind=TierJobKind.STORE, pages=PAGES, timeout_s=1.0))
    assert str(failures.get(timeout=10.0)) == "a bug"
    worker.close()


def test_a_failed_read_ends_the_rank_without_giving_its_pages_back() -> None:
    """Bytes that are still under way would reach the pages' next owner."""

    class Reader(FakeCopier):
        memory = SimpleNamespace(record_event=lambda: None)

        def load(self, *_: object) -> int:
            raise TransferError("the transport gave up")

    failures, outbox = queue.SimpleQueue[Exception](), ReportingOutbox()
    worker = tier_worker.TierWorker(cast(Any, Reader()), None, 0, "leader", lambda: cast(Any, outbox), failures.put)
    worker.submit(TierJob(job_id=0, kind=TierJobKind.LOAD, pages=PAGES))
    error = failures.get(timeout=10.0)
    assert isinstance(error, PeerLostError), "the peer's own error, if any, matters more"
    assert "the transport gave up" in str(error)
    worker.close()
    assert outbox.sent.empty()
