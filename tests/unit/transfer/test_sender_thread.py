"""The sender thread writes in order, reports every outcome, and writes nothing for transfers that have ended."""

import queue
from collections.abc import Iterator

import pytest

from cluster.spec.ids import Room
from cluster.spec.transfer_messages import PageDigests
from tests.fakes.loopback import Loopback
from transfer import sender
from transfer.backends.interface import Region
from transfer.page_range import Span
from transfer.sender import Cancelled, Outcome, SenderThread, SendJob, Write, WriteFailed, Written

PAGE = 4


class _Rig:
    def __init__(self) -> None:
        self.backend = Loopback()
        self.source = self.backend.allocate(64)
        self.source.buffer[:] = bytes(range(64))
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.thread = SenderThread(self.backend, self.source, self.outcomes.put, self.failures.put)

    def job(self, room: int, pages: list[int], *targets: Region) -> SendJob:
        spans = [Span(PAGE * page, PAGE * page, PAGE) for page in pages]
        writes = [Write(target.endpoint, spans) for target in targets]
        return SendJob(room=Room(room), prepare=lambda: (writes, []), num_pages=len(pages))

    def next(self) -> Outcome:
        return self.outcomes.get(timeout=10)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Rig]:
    monkeypatch.setattr(sender, "BATCH_SPANS", 2)
    rig = _Rig()
    yield rig
    rig.backend.gate.set()
    rig.thread.close()


def test_a_job_reaches_every_target_in_bounded_batches(rig: _Rig) -> None:
    one, two = rig.backend.allocate(64), rig.backend.allocate(64)
    rig.thread.send(rig.job(1, [0, 2, 3], one, two))
    assert rig.next() == Written(Room(1), 3, 2 * 3 * PAGE)
    expected = bytes([0, 1, 2, 3, 0, 0, 0, 0, *range(8, 16)])
    assert bytes(one.buffer[:16]) == bytes(two.buffer[:16]) == expected
    assert rig.backend.batch_sizes == [2, 1, 2, 1]


def test_a_cancellation_lets_the_running_batch_end_and_skips_the_rest(rig: _Rig) -> None:
    target = rig.backend.allocate(64)
    rig.backend.gate.clear()
    rig.thread.send(rig.job(1, [0, 1, 2, 3], target))
    rig.thread.send(rig.job(1, [4], target))
    rig.thread.send(rig.job(2, [5], target))
    assert rig.backend.is_writing.wait(10)
    rig.thread.cancel(Room(1))
    assert rig.outcomes.empty()
    rig.backend.gate.set()
    assert rig.next() == Written(Room(2), 1, PAGE)
    assert rig.next() == Cancelled(Room(1))
    written = [bool(any(target.buffer[PAGE * page : PAGE * (page + 1)])) for page in range(6)]
    assert written == [True, True, False, False, False, True]


def test_a_failure_bars_its_transfer_and_no_other(rig: _Rig) -> None:
    bad, good = rig.backend.allocate(64), rig.backend.allocate(64)
    rig.backend.failing.add(bad.endpoint.session)
    rig.thread.send(rig.job(1, [0], bad))
    rig.thread.send(rig.job(1, [1], good))
    rig.thread.send(rig.job(2, [2], good))
    outcomes = [rig.next(), rig.next()]
    assert WriteFailed(Room(1), "loopback-1 fails") in outcomes
    assert Written(Room(2), 1, PAGE) in outcomes
    assert not any(good.buffer[PAGE : 2 * PAGE])
    rig.thread.cancel(Room(1))
    assert rig.next() == Cancelled(Room(1))
    assert rig.outcomes.empty()


def test_a_failure_is_reported_when_no_more_bytes_move_and_others_do_not_wait(rig: _Rig) -> None:
    bad, good = rig.backend.allocate(64), rig.backend.allocate(64)
    rig.backend.failing.add(bad.endpoint.session)
    rig.backend.drained.clear()
    rig.thread.send(rig.job(1, [0], bad))
    rig.thread.send(rig.job(2, [2], good))
    assert rig.next() == Written(Room(2), 1, PAGE)
    rig.thread.send(rig.job(1, [1], good))
    rig.thread.cancel(Room(1))
    rig.thread.cancel(Room(9))
    assert rig.next() == Cancelled(Room(9))
    assert rig.outcomes.empty(), "the pages are given back while bytes may move"
    rig.backend.drained.set()
    assert rig.next() == WriteFailed(Room(1), "loopback-1 fails")
    assert not any(good.buffer[PAGE : 2 * PAGE])


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_queued_jobs_of_an_ended_transfer_leave_its_pages_alone(rig: _Rig, *, is_cancelled: bool) -> None:
    """The pages may belong to another request by then."""
    bad, good, prepared = rig.backend.allocate(64), rig.backend.allocate(64), list[str]()

    def prepare() -> tuple[list[Write], list[PageDigests]]:
        prepared.append("published and digested")
        return [], []

    rig.backend.failing.add(bad.endpoint.session)
    rig.backend.gate.clear()
    rig.thread.send(rig.job(1, [0], good if is_cancelled else bad))
    assert rig.backend.is_writing.wait(10)
    rig.thread.send(SendJob(room=Room(1), prepare=prepare, num_pages=1))
    rig.thread.send(rig.job(2, [2], good))
    if is_cancelled:
        rig.thread.cancel(Room(1))
    rig.backend.gate.set()
    while rig.next() != Written(Room(2), 1, PAGE):
        pass
    assert not prepared


def test_a_bug_in_a_job_is_an_outcome_too(rig: _Rig) -> None:
    target = rig.backend.allocate(8)
    rig.thread.send(rig.job(1, [7], target))
    outcome = rig.next()
    assert isinstance(outcome, WriteFailed)
    assert "exceeds the 8 bytes of the target" in outcome.reason


def test_forget_comes_after_the_jobs_before_it(rig: _Rig) -> None:
    target = rig.backend.allocate(64)
    rig.thread.send(rig.job(1, [0], target))
    rig.thread.forget(target.endpoint)
    rig.thread.cancel(Room(9))
    assert [type(rig.next()) for _ in range(2)] == [Written, Cancelled]
    assert rig.backend.forgotten == ["loopback-1"]


def test_close_skips_what_is_queued(rig: _Rig) -> None:
    target = rig.backend.allocate(64)
    rig.thread.send(rig.job(1, [0], target))
    assert rig.next() == Written(Room(1), 1, PAGE)
    rig.thread.close()
    rig.thread.close()
    rig.thread.send(rig.job(2, [1], target))
    assert rig.outcomes.empty()
    assert not any(target.buffer[PAGE:])


def test_failed_transfers_leave_no_state(rig: _Rig) -> None:
    target = rig.backend.allocate(8)
    for room in range(5):
        rig.thread.send(rig.job(room, [7], target))
        assert isinstance(rig.next(), WriteFailed)
    rig.thread.cancel(Room(9))
    assert rig.next() == Cancelled(Room(9))
    assert not rig.thread._barred


def test_a_thread_that_dies_is_reported(rig: _Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError("no such peer")

    monkeypatch.setattr(rig.backend, "forget", fail)
    rig.thread.forget(rig.backend.allocate(64).endpoint)
    assert str(rig.failures.get(timeout=10)) == "no such peer"
