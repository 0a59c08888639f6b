"""Storage that is only slow: it is asked few questions, and neither a request nor the end of a worker waits for it."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.spec.registry import KvOwnership
from cluster.spec.tiers import MoveKind, MovePages, PagesMoved
from tests.fakes.page_stores import GEOMETRY, RankStore, page_of, rows_of, sizes
from workers.hicache import mover
from workers.hicache.storage.cuts import NUM_MARKS, KnownCuts
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import Read, StorageError, StorageObject, Written, write_one
from workers.hicache.storage.objects import MARK_BYTES, Cut, Naming
from workers.hicache.storage.throttle import Throttle

PAGES = [page_of(number) for number in range(4)]
MINE = Cut(KvOwnership.REPLICATED, 1, 1, 1)


class CountingStorage(FileStorage):
    """Every question takes long and is counted."""

    delay_s = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 20, fsync=False)
        self.asked = Counter[str]()

    def count_leading(self, names: Sequence[str]) -> int:
        self._take("count_leading")
        return super().count_leading(names)

    def present(self, depths: Mapping[str, int]) -> list[str]:
        self._take("present")
        return super().present(depths)

    def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
        self._take("read")
        yield from super().read(objects)

    def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
        self._take("write")
        yield from super().write(objects)

    def _take(self, question: str) -> None:
        self.asked[question] += 1
        time.sleep(self.delay_s)


def test_a_look_up_asks_once_for_marks_and_once_for_each_cut(tmp_path: Path) -> None:
    backend = CountingStorage(tmp_path)
    for of in (sizes(), sizes(cp=2)):
        for row in rows_of(of):
            RankStore(backend, row).write(PAGES[:2])
    backend.asked.clear()
    reader = RankStore(backend, rows_of(sizes(tp=2))[0])
    assert reader.look_up(PAGES) == [True, True, False, False]
    assert backend.asked == {"present": 1, "read": 1, "count_leading": 6}


def test_pages_are_read_and_written_in_one_call(tmp_path: Path) -> None:
    backend = CountingStorage(tmp_path)
    store = RankStore(backend, rows_of(sizes())[0])
    assert store.write(PAGES[:1]) == [True]
    backend.asked.clear()
    assert store.write(PAGES) == [True] * 4
    assert backend.asked == {"present": 1, "write": 1}
    backend.asked.clear()
    assert store.read(PAGES) == [True] * 4
    assert backend.asked == {"read": 1}


@pytest.mark.parametrize("num_good", range(5))
def test_storage_that_fails_in_the_middle_of_a_call_fails_the_pages_behind(tmp_path: Path, num_good: int) -> None:
    class Failing(FileStorage):
        num_left = 4

        def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
            for outcome in super().read(objects):
                self.take()
                yield outcome

        def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
            for item in objects:
                self.take()
                yield from super().write([item])

        def take(self) -> None:
            if not self.num_left:
                raise StorageError("the disk is gone")
            self.num_left -= 1

    backend = Failing(tmp_path, 1 << 20, fsync=False)
    store = RankStore(backend, rows_of(sizes())[0])
    store.store.look_up(PAGES, time.monotonic() + 10.0, store.failures)
    backend.num_left = 2 + num_good  # the mark of our cut is written, and read once more
    expected = [number < num_good for number in range(4)]
    assert store.write(PAGES) == expected
    assert store.failures["error"] == 4 - num_good
    backend.num_left = num_good
    assert store.read(PAGES) == expected
    assert store.failures["error"] == 2 * (4 - num_good)


def test_of_a_call_that_takes_too_long_the_rest_is_left_out(tmp_path: Path) -> None:
    class Slow(FileStorage):
        num_read = 0

        def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
            for outcome in super().read(objects):
                self.num_read += 1
                time.sleep(0.05)
                yield outcome

    backend = Slow(tmp_path, 1 << 20, fsync=False)
    store = RankStore(backend, rows_of(sizes())[0])
    store.write(PAGES)
    backend.num_read = 0
    done = store.store.fetch(PAGES, store.buffer, time.monotonic() + 0.01, store.failures)
    assert (done, backend.num_read) == ([True, False, False, False], 1)
    assert store.failures["late"] == 3


@pytest.mark.parametrize("page_s", [0.12, 5.0])
def test_a_rate_limit_keeps_no_order_longer_than_its_patience(tmp_path: Path, page_s: float) -> None:
    backend, (row,) = CountingStorage(tmp_path), rows_of(sizes())
    RankStore(backend, row).write(PAGES)
    limited = RankStore(backend, row, reads=Throttle(row.layout.page_bytes / page_s))
    start_s = time.monotonic()
    done = limited.store.fetch(PAGES, limited.buffer, start_s + 0.3, limited.failures)
    assert time.monotonic() - start_s < 2.0
    assert done == sorted(done, reverse=True)
    assert (done[0], done[-1]) == (True, False)
    assert limited.failures["late"] == done.count(False)


def test_no_question_is_asked_when_the_time_is_over_or_the_worker_ends(tmp_path: Path) -> None:
    backend = CountingStorage(tmp_path)
    store = RankStore(backend, rows_of(sizes())[0])
    store.write(PAGES)
    backend.asked.clear()
    assert store.store.look_up(PAGES, time.monotonic() - 1.0, store.failures) == [False] * 4
    store.store.stop()
    assert store.look_up(PAGES) == [False] * 4
    assert not backend.asked
    assert store.failures["late"] == 2


def test_a_look_up_goes_on_no_longer_than_the_call_at_hand(tmp_path: Path) -> None:
    backend = CountingStorage(tmp_path)
    store = RankStore(backend, rows_of(sizes())[0])
    backend.delay_s = 0.05
    assert store.store.look_up(PAGES, time.monotonic() + 0.01, store.failures) == [False] * 4
    assert backend.asked == {"present": 1}


@pytest.mark.parametrize("of", [sizes(cp=10), sizes(cp=37, pp=2), sizes(tp=4, pp=2)])
def test_pages_of_any_cut_are_found(tmp_path: Path, of: Any) -> None:
    backend = CountingStorage(tmp_path)
    for row in rows_of(of):
        RankStore(backend, row).write(PAGES)
    reader = RankStore(backend, rows_of(sizes())[0])
    assert reader.look_up(PAGES) == reader.read(PAGES) == [True] * 4
    assert not reader.failures["cut"]


def test_cuts_that_this_model_cannot_have_are_refused_and_counted_once(tmp_path: Path) -> None:
    backend, naming, now = CountingStorage(tmp_path), Naming(GEOMETRY, "w"), [0.0]
    marks = [naming.mark_of(Cut(KvOwnership.SHARDED, 2, tp, pp)) for tp, pp in ((3, 1), (1, 9))]
    for number, mark in enumerate((*marks, b"folded-cp1-tp1-pp1".ljust(MARK_BYTES, b"\0"), b"torn")):
        write_one(backend, naming.mark(number), [memoryview(mark)])
    known = KnownCuts(backend, naming, MINE, lambda: now[0])
    assert known.look() == 3
    now[0] += 10.0
    assert known.look() == 0
    assert known.cuts == [MINE]
    assert backend.asked["present"] == 2


def test_a_mark_that_cannot_be_read_hides_no_other_and_is_counted_once(tmp_path: Path) -> None:
    backend, naming, now = CountingStorage(tmp_path), Naming(GEOMETRY, "w"), [0.0]
    early, late = Cut(KvOwnership.SHARDED, 2, 1, 1), Cut(KvOwnership.SHARDED, 4, 1, 1)
    for number in (0, 2):
        (tmp_path / naming.namespace() / "cu" / f"cut.{number}").mkdir(parents=True)
    known = KnownCuts(backend, naming, MINE, lambda: now[0])
    KnownCuts(backend, naming, early).mark()
    assert known.look() == 2
    assert known.cuts == [MINE, early]
    KnownCuts(backend, naming, late).mark()
    known.mark()
    now[0] += 10.0
    assert known.look() == 0
    assert known.cuts == [MINE, early, late]
    (own,) = (path for path in tmp_path.rglob("cut.4") if path.is_file())
    own.unlink()
    own.mkdir()
    now[0] += 10.0
    known.mark()
    reader = KnownCuts(backend, naming, late)
    assert reader.look() == 3
    assert reader.cuts == [late, early, MINE]


def test_marks_that_cannot_be_read_back_are_not_left_again_and_again(tmp_path: Path) -> None:
    naming = Naming(GEOMETRY, "w")

    class Unreadable(FileStorage):
        def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
            raise StorageError(f"nothing can be read of {len(objects)}")

    known = KnownCuts(Unreadable(tmp_path, 1 << 20, fsync=False), naming, MINE)
    for _ in range(3):
        with pytest.raises(StorageError, match=r"cut.0 cannot be read after it was written"):
            known.mark()
    assert not list(tmp_path.rglob("cut.*"))


@pytest.mark.parametrize("num_others", [3, NUM_MARKS])
def test_a_mark_takes_the_first_number_that_is_free(tmp_path: Path, num_others: int) -> None:
    backend, naming, now = CountingStorage(tmp_path), Naming(GEOMETRY, "w"), [0.0]
    others = [Cut(KvOwnership.SHARDED, cp, 1, 1) for cp in range(1, num_others + 1)]
    for other in others:
        KnownCuts(backend, naming, other).mark()
        KnownCuts(backend, naming, other).mark()
    mine = KnownCuts(backend, naming, MINE, lambda: now[0])
    mine.mark()
    assert mine.look() == 0
    assert sorted(mine.cuts[1:], key=others.index) == others
    reader = KnownCuts(backend, naming, others[0])
    reader.look()
    assert (MINE in reader.cuts) is (num_others < NUM_MARKS)


def test_of_two_who_mark_the_same_number_at_once_both_are_found(tmp_path: Path) -> None:
    naming, other = Naming(GEOMETRY, "w"), Cut(KvOwnership.SHARDED, 2, 1, 1)

    class Racing(FileStorage):
        def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
            if objects[0].name == naming.mark(0):
                list(super().write([StorageObject(naming.mark(0), [memoryview(naming.mark_of(other))])]))
            yield from super().write(objects)

    backend = Racing(tmp_path, 1 << 20, fsync=False)
    KnownCuts(backend, naming, MINE).mark()
    reader = KnownCuts(backend, naming, Cut(KvOwnership.SHARDED, 8, 1, 1))
    reader.look()
    assert reader.cuts[1:] == [other, MINE]


def test_one_thread_does_not_wait_for_the_look_of_another(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Hanging(FileStorage):
        def present(self, depths: Mapping[str, int]) -> list[str]:
            entered.set()
            assert go_on.wait(10.0)
            return super().present(depths)

    known = KnownCuts(Hanging(tmp_path, 1 << 20, fsync=False), Naming(GEOMETRY, "w"), MINE)
    other = threading.Thread(target=known.look)
    other.start()
    assert entered.wait(10.0)
    assert known.look() == 0
    go_on.set()
    other.join()


class FakeOutbox:
    def send(self, address: str, message: object) -> None: ...

    def close(self) -> None: ...


class FakeCopier:
    page_bytes = 1

    def owns(self, page: object) -> bool:  # noqa: ARG002 - as a copier's
        return True

    def host_page(self, page: object) -> memoryview:  # noqa: ARG002 - as a copier's
        return memoryview(bytearray(1))

    def mark(self) -> None: ...


class TellingOutbox(FakeOutbox):
    """Tells what was sent."""

    def __init__(self) -> None:
        self.sent = queue.SimpleQueue[PagesMoved]()

    def send(self, address: str, message: object) -> None:  # noqa: ARG002 - as an outbox's
        assert isinstance(message, PagesMoved)
        self.sent.put(message)


def test_orders_behind_one_that_hangs_are_refused_when_their_patience_is_over() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Store:
        def fetch(self, pages: Sequence[object], *_: object) -> list[bool]:
            entered.set()
            assert go_on.wait(10.0)
            return [True] * len(pages)

        def figures(self) -> None: ...

        def stop(self) -> None: ...

        def close(self) -> None: ...

    outbox = TellingOutbox()
    moves = mover.PageMover(cast(Any, FakeCopier()), cast(Any, Store()), 3, "leader", lambda: cast(Any, outbox))
    moves.take(MovePages(number=0, kind=MoveKind.FETCH, pages=PAGES, patience_s=0.0))
    assert entered.wait(10.0)
    for number, patience_s in ((1, 60.0), (2, 0.02), (3, 0.01)):
        moves.take(MovePages(number=number, kind=MoveKind.FETCH, pages=PAGES[:number], patience_s=patience_s))
    refused = {answer.number: answer for answer in (outbox.sent.get(timeout=10.0) for _ in range(2))}
    assert (refused[2].waited_s, refused[3].waited_s) == (0.02, 0.01)
    assert {number: (answer.done, answer.failures) for number, answer in refused.items()} == {
        2: ([False] * 2, {"late": 2}),
        3: ([False] * 3, {"late": 3}),
    }
    assert outbox.sent.empty(), "pages that may still be written to are given back"
    go_on.set()
    late, last = (outbox.sent.get(timeout=10.0) for _ in range(2))
    assert [(answer.number, answer.done) for answer in (late, last)] == [(0, [True] * 4), (1, [True])]
    assert late.waited_s < late.busy_s
    assert last.waited_s > last.busy_s
    moves.close()


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

    monkeypatch.setattr(mover, "CLOSE_S", 0.05 if hangs else 10.0)
    moves = mover.PageMover(cast(Any, FakeCopier()), cast(Any, Store()), 0, "leader", cast(Any, FakeOutbox))
    for number in range(3):
        moves.take(MovePages(number=number, kind=MoveKind.STORE, pages=PAGES, patience_s=1.0))
    assert entered.wait(10.0)
    if not hangs:
        threading.Timer(0.05, go_on.set).start()
    moves.close()
    go_on.set()
    assert calls == ["store", "stop", *([] if hangs else ["close"])]
    assert ("left behind: writes" in caplog.text) is hangs
