"""Leaders' tier jobs: held pages are released, and every page is stored once, within the rate limit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.hicache_config import PrefetchPolicy, WritePolicy
from cluster.spec.ids import Room
from cluster.spec.kv import page_keys
from cluster.spec.tiers import StorageFigures, TierJob, TierJobKind, TierJobResult, TierPage
from tests.fakes.page_stores import RankStore, page_of, records_of, sizes
from tests.fakes.tier_world import PAGE_SIZE, TierWorld
from tests.unit.workers.test_tiers import world_of
from workers.hicache.policy.host_index import HostIndex
from workers.hicache.policy.jobs import Breaker, Outcome, TierJobs
from workers.hicache.policy.storage_writer import RENEW_S, StorageWriter
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import StorageObject, Written

KEYS = page_keys([0] * 8, PAGE_SIZE)


def stored_world(**settings: Any) -> TierWorld:
    """Return a world with a prompt in storage only."""
    world = world_of(backend="files", **settings)
    world.submit([0] * 8)
    world.drain()
    world.finish(0)
    world.drain()
    world.restart()
    return world


def check_nothing_is_held(world: TierWorld) -> None:
    world.tiers.host.flush()
    assert world.tiers.host.num_used == 0, "host pages are held for nobody"


def test_host_pages_are_held_for_a_request_until_it_starts_and_no_longer() -> None:
    world = stored_world()
    room = Room(9)
    world.tiers.expect(room, KEYS, world.now_s)
    world.advance()
    world.drain()
    world.tiers.host.flush()
    assert [world.tiers.host.page_of(key) for key in KEYS] == [0, 1, 2, 3]
    world.tiers.prefetcher.forget(room, world.now_s)
    check_nothing_is_held(world)


def test_pages_fetched_for_an_ended_request_are_released() -> None:
    world = stored_world(prefetch=PrefetchPolicy.TIMEOUT)
    world.tiers.expect(Room(9), KEYS, world.now_s)
    world.advance()
    while not any(job.kind is TierJobKind.FETCH for job in world.ranks[0].copies):
        world.step(0, fails=False)
    world.tiers.prefetcher.forget(Room(9), world.now_s)
    world.drain()
    assert [world.tiers.host.page_of(key) for key in KEYS] == [0, 1, 2, 3]
    check_nothing_is_held(world)


@pytest.mark.parametrize("fails", [False, True])
def test_host_pages_are_held_while_they_are_loaded_and_no_longer(*, fails: bool) -> None:
    world = world_of()
    world.start([0] * 8)
    world.drain()
    world.finish(0)
    world.allocator.flush()
    world.start([0] * 8)
    world.tiers.host.flush()
    assert world.tiers.host.num_used == 4
    while world.loading:
        world.step(0, fails=fails)
    world.drain()
    check_nothing_is_held(world)


class WriterAlone:
    """Storage writer over full host memory, whose jobs can be inspected."""

    def __init__(self, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> None:
        self.host, self.jobs, self.breaker = HostIndex(len(KEYS), 1), TierJobs(1), Breaker()
        for number, key in enumerate(KEYS):
            self.host.reserve(key, number)
            self.host.fill(key)
        self.writer = StorageWriter(policy, self.host, self.jobs, self.breaker)

    def submitted(self, now_s: float = 0.0) -> list[TierJob]:
        self.writer.advance(now_s)
        jobs, self.jobs.outgoing = self.jobs.outgoing, []
        return jobs

    def answer(self, job: TierJob, now_s: float, *, is_done: bool) -> None:
        done, failures = [is_done] * len(job.pages), {} if is_done else {"error": 1}
        self.jobs.on_result(TierJobResult(job_id=job.job_id, global_rank=0, done=done, failures=failures), now_s)


def keys_of(jobs: Sequence[TierJob]) -> list[bytes]:
    return [page.key for job in jobs for page in job.pages]


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_page_is_stored_once_however_often_it_is_due(policy: WritePolicy) -> None:
    alone = WriterAlone(policy)
    for key in (*KEYS, *KEYS):
        alone.writer.note_saved(key)
    alone.writer.note_used(KEYS, 0.0)
    (job,) = alone.submitted()
    assert keys_of([job]) == KEYS
    for _ in range(2):
        alone.writer.note_used(KEYS, 0.0)
        alone.writer.note_saved(KEYS[0])
        alone.writer.drain(is_draining=True)
        assert alone.submitted() == []
        alone.answer(job, 0.0, is_done=True)
    assert alone.writer.num_waiting == 0


@pytest.mark.parametrize("policy", WritePolicy)
def test_stored_pages_are_offered_again_only_after_later_use(policy: WritePolicy) -> None:
    alone = WriterAlone(policy)
    for key in KEYS:
        alone.writer.note_saved(key)
    (job,) = alone.submitted()
    alone.answer(job, 1.0, is_done=True)
    for now_s in (1.0, RENEW_S, RENEW_S + 1, RENEW_S + 2, 2 * RENEW_S, 2 * RENEW_S + 3):
        alone.writer.note_used(KEYS[:2], now_s)
        jobs = alone.submitted(now_s)
        assert keys_of(jobs) == (KEYS[:2] if now_s in (RENEW_S + 1, 2 * RENEW_S + 3) else [])
        for job in jobs:
            alone.answer(job, now_s, is_done=True)
    assert alone.submitted(1e9) == [], "what nobody uses"
    assert alone.writer.num_lost == 0


def test_a_draining_replica_stores_new_pages_first() -> None:
    alone = WriterAlone(WritePolicy.WRITE_THROUGH)
    for key in KEYS[:2]:
        alone.writer.note_saved(key)
    (job,) = alone.submitted()
    alone.answer(job, 0.0, is_done=True)
    alone.writer.drain(is_draining=True)
    assert keys_of(alone.submitted()) == KEYS[2:] + KEYS[:2]


def test_pages_that_wait_too_long_are_counted() -> None:
    alone = WriterAlone()
    for _ in range(3):
        alone.breaker.note(0.0, is_success=False)
    gone = [bytes([number]) for number in range(9)]
    for key in (*KEYS, *KEYS, *gone):
        alone.writer.note_saved(key)
    assert alone.submitted() == []
    assert (alone.writer.num_waiting, alone.writer.num_lost) == (len(KEYS), len(gone))
    assert alone.submitted(100.0) == []
    assert alone.writer.num_lost == len(KEYS) + len(gone)


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_pages_that_are_being_stored_do_not_wait_for_it(policy: WritePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.hicache.policy.storage_writer.BATCH_PAGES", 2)
    alone = WriterAlone(policy)
    for key in KEYS:
        alone.writer.note_saved(key)
    assert len(alone.submitted()) == 2
    alone.writer.note_used(KEYS, 0.0)
    alone.writer.drain(is_draining=True)
    assert alone.submitted() == []
    assert alone.writer.num_waiting == 0


def test_failing_storage_gets_no_writes_for_a_while_and_reads_continue() -> None:
    alone = WriterAlone()
    for _ in range(3):
        alone.writer.note_used(KEYS, 0.0)
        (job,) = alone.submitted()
        alone.answer(job, 0.0, is_done=False)
    alone.writer.note_used(KEYS, 0.0)
    assert alone.submitted(0.9) == []
    assert alone.writer.num_waiting == len(KEYS)
    (job,) = alone.submitted(1.0)
    assert keys_of([job]) == KEYS
    alone.answer(job, 1.0, is_done=True)
    assert not alone.breaker.is_open(1.0)


def test_writes_that_fail_do_not_keep_requests_from_reading() -> None:
    world = stored_world(device_pages=64, host_pages=64)
    for number in range(1, 4):
        world.start([number] * 8)
        rank = world.ranks[0]
        while rank.inbox or rank.copies:
            world.step(0, fails=bool(rank.copies) and rank.copies[0].kind is TierJobKind.STORE)
    assert world.tiers.state().num_opened == 1
    world.tiers.expect(Room(9), KEYS, world.now_s)
    assert world.tiers.prefetcher.is_waiting(Room(9), world.now_s)


@pytest.mark.parametrize("prefetch", PrefetchPolicy)
def test_pages_of_a_hanging_read_are_held_and_counted_and_reads_stop(prefetch: PrefetchPolicy) -> None:
    world = stored_world(prefetch=prefetch, host_pages=10)
    world.tiers.expect(Room(9), KEYS, world.now_s)
    world.advance()
    while not any(job.kind is TierJobKind.FETCH for job in world.ranks[0].copies):
        world.step(0, fails=False)
    world.tiers.prefetcher.forget(Room(9), world.now_s)
    world.advance()
    assert world.tiers.state().num_stuck == 0
    world.now_s += 1000.0
    world.advance()
    state = world.tiers.state()
    assert (state.num_stuck, state.used_host_pages, state.num_opened) == (4, 4, 1)
    world.tiers.host.flush()
    assert world.tiers.state().used_host_pages == 4, "pages that may still be written to are given up"
    for number in range(10, 13):
        world.tiers.expect(Room(number), page_keys([number] * 8, PAGE_SIZE), world.now_s)
        world.advance()
    assert not world.ranks[0].inbox
    assert not any(world.tiers.prefetcher.is_waiting(Room(number), world.now_s) for number in range(10, 13))
    world.drain()
    assert [world.tiers.host.page_of(key) for key in KEYS] == [0, 1, 2, 3]
    assert (world.tiers.state().num_stuck, world.tiers.state().num_opened) == (0, 1)
    world.tiers.expect(Room(13), page_keys([13] * 8, PAGE_SIZE), world.now_s)
    world.advance()
    assert world.ranks[0].inbox, "it is asked again"


def test_a_replica_does_not_wait_for_a_write_that_hangs_when_it_drains() -> None:
    world = world_of(backend="files")
    world.start([0] * 8)
    rank = world.ranks[0]
    while not (rank.copies and rank.copies[0].kind is TierJobKind.STORE):
        world.step(0, fails=False)
    world.tiers.drain(is_draining=True)
    world.advance()
    assert world.tiers.state().is_storing
    world.now_s += 1000.0
    world.advance()
    assert (world.tiers.state().is_storing, world.tiers.state().num_stuck) == (False, 4)
    world.drain()
    assert (len(rank.stored), world.tiers.state().num_stuck) == (4, 0)


def test_a_page_that_is_stored_is_not_written_again(tmp_path: Path) -> None:
    written = list[str]()

    class Counted(FileStorage):
        def write(self, objects: Sequence[StorageObject]) -> list[Written]:
            written.extend(item.name for item in objects)
            return super().write(objects)

    store = RankStore(Counted(tmp_path, 1 << 20), records_of(sizes())[0])
    pages = [page_of(number) for number in range(3)]
    assert store.write(pages[:2]) == [True] * 2
    assert store.write(pages) == [True] * 3
    assert len(written) == len(set(written)) == 3


def test_each_rank_has_the_orders_open_that_it_has_not_answered() -> None:
    world = world_of(cp=2, host_pages=8)
    none = dict.fromkeys(TierJobKind, 0)
    assert [rank.num_open for rank in world.tiers.state().ranks] == [none] * 2
    world.start([0] * 4)
    assert [rank.num_open for rank in world.tiers.state().ranks] == [{**none, TierJobKind.SAVE: 1}] * 2
    while world.ranks[0].inbox or world.ranks[0].copies:
        world.step(0, fails=False)
    assert [rank.num_open[TierJobKind.SAVE] for rank in world.tiers.state().ranks] == [0, 1]
    world.drain()
    assert all(not any(rank.num_open.values()) for rank in world.tiers.state().ranks)


def test_every_rank_reports_its_own_pages_and_storage() -> None:
    world = world_of(cp=2, host_pages=1)
    owners = list[int]()
    for tokens in ([0] * 4, *([number] * 2 for number in range(1, 7))):
        world.start(tokens)
        world.drain()
        world.finish(0)
        last = world.tiers.host.page_of(page_keys(tokens, PAGE_SIZE)[-1])
        assert last is not None
        owners.append(last % 2)
    figures = StorageFigures(used_bytes=7, num_evicted=1, evicted_bytes=3)
    jobs = TierJobs(2)
    jobs.submit(TierJobKind.STORE, [], lambda _: None)
    jobs.on_result(TierJobResult(job_id=1, global_rank=1, done=[], storage=figures), 0.0)
    assert jobs.storage == {1: figures}
    first, second = world.tiers.state().ranks
    assert (first.global_rank, second.global_rank) == (0, 1)
    assert first.host_pages == second.host_pages == first.used_host_pages == second.used_host_pages == 1
    # The first prompt fills all host memory, and each other prompt needs one page of it.
    assert [first.num_evicted, second.num_evicted] == [owners[1:].count(0), owners[1:].count(1)]
    assert 0 < first.num_evicted < 6


def test_an_order_is_over_when_every_rank_has_answered_once() -> None:
    jobs, ended = TierJobs(2), list[Outcome]()
    pages = [TierPage(key=bytes([number]), index=number, host=number) for number in range(3)]
    jobs.submit(TierJobKind.FETCH, pages, ended.append)
    (job,) = jobs.outgoing
    assert jobs.on_result(TierJobResult(job_id=job.job_id, global_rank=0, done=[True, True, False]), 1.0)
    assert not jobs.on_result(TierJobResult(job_id=job.job_id, global_rank=0, done=[True, True, False]), 1.0)
    assert not jobs.on_result(TierJobResult(job_id=job.job_id + 1, global_rank=1, done=[]), 1.0)
    assert not ended
    assert jobs.on_result(
        TierJobResult(job_id=job.job_id, global_rank=1, done=[True, False, True], failures={"corrupt": 1}), 1.0
    )
    (outcome,) = ended
    assert (outcome.done, outcome.num_leading, outcome.failures["corrupt"]) == ([True, False, False], 1, 1)


def test_failures_in_flight_do_not_extend_a_pause() -> None:
    breaker, now_s = Breaker(), 0.0
    for _ in range(3):
        breaker.note(now_s, is_success=False)
    for pause_s in (1.0, 2.0, 4.0, 8.0):
        assert breaker.is_open(now_s + pause_s - 0.1)
        assert not breaker.is_open(now_s + pause_s)
        now_s += pause_s
        for _ in range(2):  # the limit of jobs in flight
            breaker.note(now_s, is_success=False)
    assert breaker.num_opened == 5
