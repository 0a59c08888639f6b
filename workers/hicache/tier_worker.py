"""Tier jobs on one rank, run concurrently with the forward pass."""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from cluster.channel import Outbox
from cluster.spec.errors import PeerUnreachableError, TransferError
from cluster.spec.tiers import TierJob, TierJobKind, TierJobResult
from workers.device import Event
from workers.hicache.copier import Copier
from workers.hicache.storage.page_store import PageStore
from workers.memory.layerwise_load import LayerwiseLoad

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Maximum wait for running jobs when a worker ends, since storage may hang."""

_COPIES = (TierJobKind.SAVE, TierJobKind.LOAD)
_QUEUES = {
    TierJobKind.SAVE: "saves",
    TierJobKind.LOAD: "loads",
    TierJobKind.LOOK_UP: "reads",
    TierJobKind.FETCH: "reads",
    TierJobKind.STORE: "writes",
}


class TierWorker(Protocol):
    """The worker loop's interface to the tiers."""

    def submit(self, job: TierJob) -> None:
        """Queue a job to run after all earlier steps."""
        ...

    def submit_layerwise(self, job: TierJob) -> LayerwiseLoad:
        """Queue a load for the next step, which waits for each layer that it reads."""
        ...

    def close(self) -> None:
        """Finish running jobs, and discard queued ones."""
        ...


class NoTierWorker:
    """Tier worker of a rank without host memory, which never gets a job."""

    def submit(self, job: TierJob) -> None:
        raise AssertionError(f"tier job {job.job_id} for a worker without host memory")

    def submit_layerwise(self, job: TierJob) -> LayerwiseLoad:
        raise AssertionError(f"tier job {job.job_id} for a worker without host memory")

    def close(self) -> None:
        pass


class PageTierWorker:
    """Tier worker that moves pages between device, host memory and storage, with one queue per kind of move."""

    def __init__(
        self,
        copier: Copier,
        store: PageStore | None,
        global_rank: int,
        leader_address: str,
        open_outbox: Callable[[], Outbox],
    ) -> None:
        """Start the queues, each with its own outbox; without a store there are no storage jobs."""
        self._copier = copier
        self._store = store
        self._global_rank = global_rank
        self._events: dict[int, Event | None] = {}
        """Events by job id, after which the job's copies start."""
        self._loads: dict[int, LayerwiseLoad] = {}
        """Layerwise loads by job id."""
        names = ("saves", "loads", "reads", "writes") if store else ("saves", "loads")
        self._queues = {
            name: _JobQueue(f"hicache-{name}", leader_address, open_outbox(), self._do, self._refuse) for name in names
        }

    def submit(self, job: TierJob) -> None:
        """Queue a job; called between steps, so that every page to be saved has its KV."""
        if job.kind in _COPIES:
            self._events[job.job_id] = self._copier.record_event()
        self._queues[_QUEUES[job.kind]].put(job)

    def submit_layerwise(self, job: TierJob) -> LayerwiseLoad:
        load = self._loads[job.job_id] = LayerwiseLoad()
        self.submit(job)
        return load

    def close(self) -> None:
        if self._store is not None:
            self._store.stop()
        for each in self._queues.values():
            each.stop()
        until_s = time.monotonic() + CLOSE_S
        busy = [name for name, each in self._queues.items() if not each.wait_ended(until_s - time.monotonic())]
        if busy:
            _log.warning("gave up on unfinished tier jobs after %g s: %s", CLOSE_S, ", ".join(busy))
        elif self._store is not None:
            self._store.close()

    def _do(self, job: TierJob, waited_s: float) -> TierJobResult:
        start_s = time.monotonic()
        failures = Counter[str]()
        try:
            if job.kind in _COPIES:
                done, num_bytes = self._copy(job)
            else:
                done, num_bytes = self._use_storage(job, start_s - waited_s, failures)
        except Exception as error:  # the leader must learn that these pages are missing
            _log.warning("tier job %d (%s) failed: %r", job.job_id, job.kind, error)
            failures["transfer" if isinstance(error, TransferError) else "error"] += 1
            done, num_bytes = [False] * len(job.pages), 0
        return TierJobResult(
            job_id=job.job_id,
            global_rank=self._global_rank,
            done=done,
            num_bytes=num_bytes,
            busy_s=time.monotonic() - start_s,
            waited_s=waited_s,
            storage=self._store.figures() if self._store is not None else None,
            failures=failures,
        )

    def _refuse(self, job: TierJob) -> TierJobResult:
        """Return the result of a storage job that waited too long in its queue."""
        done = [not self._copier.owns(page) for page in job.pages]
        assert job.timeout_s is not None, "a job without a timeout is refused"
        return TierJobResult(
            job_id=job.job_id,
            global_rank=self._global_rank,
            done=done,
            waited_s=job.timeout_s,
            failures={"late": done.count(False)},
        )

    def _copy(self, job: TierJob) -> tuple[list[bool], int]:
        event, load = self._events.pop(job.job_id), self._loads.pop(job.job_id, None)
        if job.kind is TierJobKind.SAVE:
            num_bytes = self._copier.save(job.pages, event)
        elif load is None:
            num_bytes = self._copier.load(job.pages, event)
        else:
            try:
                num_bytes = self._copier.load_layerwise(job.pages, event, load)
            except Exception as error:  # the step cannot continue without the pages, so the rank fails
                load.fail(error)
                raise
        return [True] * len(job.pages), num_bytes

    def _use_storage(self, job: TierJob, since_s: float, failures: Counter[str]) -> tuple[list[bool], int]:
        """Run a storage job for the pages that this rank owns; the others need nothing from it."""
        assert self._store is not None, f"{job.kind} without storage"
        assert job.timeout_s is not None, f"{job.kind} without a timeout"
        until_s = since_s + job.timeout_s
        owned = [page for page in job.pages if self._copier.owns(page)]
        if job.kind is TierJobKind.LOOK_UP:
            found, num_bytes = self._store.look_up(owned, until_s, failures), 0
        else:
            use = self._store.fetch if job.kind is TierJobKind.FETCH else self._store.store
            found = use(owned, self._copier.host_page, until_s, failures)
            num_bytes = sum(self._copier.bytes_of(page) for page, is_done in zip(owned, found, strict=True) if is_done)
        outcomes = iter(found)
        return [next(outcomes) if self._copier.owns(page) else True for page in job.pages], num_bytes


Work = Callable[[TierJob, float], TierJobResult]
"""Function that runs a job after a wait of this many seconds; must not raise."""
Refuse = Callable[[TierJob], TierJobResult]
"""Function that returns the result of a job that waited too long to be started."""


class _JobQueue:
    """Queue of jobs of one kind, with a thread that runs them in order and a thread that reports the results.

    A hanging job stays open, since its pages may still be written to; the jobs queued after it are refused once their
    timeout has passed.
    """

    def __init__(self, name: str, leader_address: str, outbox: Outbox, work: Work, refuse: Refuse) -> None:
        """Start the threads; the queue closes the outbox."""
        self._leader_address = leader_address
        self._outbox = outbox
        self._work = work
        self._refuse = refuse
        self._events = queue.SimpleQueue[tuple[TierJob, float] | TierJobResult | None]()
        """Jobs with their arrival times, results, and None to stop."""
        self._running = queue.SimpleQueue[tuple[TierJob, float] | None]()
        self._waiting: deque[tuple[TierJob, float]] = deque()
        self._is_busy = False
        self._threads = [
            threading.Thread(target=self._do_jobs, name=f"{name}-work", daemon=True),
            threading.Thread(target=self._run, name=name, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: TierJob) -> None:
        self._events.put((job, time.monotonic()))

    def stop(self) -> None:
        """Finish the running job, and discard the others."""
        self._events.put(None)

    def wait_ended(self, timeout_s: float) -> bool:
        """Return whether the running job ends in time after ``stop``; if not, its thread ends with the process."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _do_jobs(self) -> None:
        while (item := self._running.get()) is not None:
            job, since_s = item
            self._events.put(self._work(job, time.monotonic() - since_s))

    def _run(self) -> None:
        is_stopped = False
        try:
            while self._is_busy or not is_stopped:
                try:
                    event = self._events.get(timeout=self._time_left_s())
                except queue.Empty:
                    self._refuse_late()
                    continue
                if isinstance(event, TierJobResult):
                    self._is_busy = False
                    self._report(event)
                elif event is not None:
                    self._waiting.append(event)
                is_stopped = is_stopped or event is None
                if is_stopped:
                    self._waiting.clear()
                elif self._waiting and not self._is_busy:
                    self._is_busy = True
                    self._running.put(self._waiting.popleft())
            self._running.put(None)
        finally:
            self._outbox.close()

    def _time_left_s(self) -> float | None:
        """Return the seconds until the next waiting job is refused."""
        ends_s = [since_s + job.timeout_s for job, since_s in self._waiting if job.timeout_s is not None]
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    def _refuse_late(self) -> None:
        now_s = time.monotonic()
        for item in list(self._waiting):
            job, since_s = item
            if job.timeout_s is not None and since_s + job.timeout_s <= now_s:
                self._waiting.remove(item)
                self._report(self._refuse(job))

    def _report(self, result: TierJobResult) -> None:
        try:
            self._outbox.send(self._leader_address, result)
        except PeerUnreachableError as error:
            _log.warning("%s", error)
