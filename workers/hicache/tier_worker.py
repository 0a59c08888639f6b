"""Execution of tier jobs on one rank, concurrently with the forward pass."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from math import inf

from cluster.channel import Outbox, send_or_log
from cluster.spec.errors import PeerLostError, TransferError
from cluster.spec.tiers import JOB_QUEUES, TierJob, TierJobKind, TierJobResult
from workers.device import Event
from workers.hicache.copier import Copier
from workers.hicache.storage.page_store import PageStore
from workers.memory.layerwise_load import LayerwiseLoad

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Maximum wait for running jobs at shutdown, since storage may hang."""

_COPIES = (TierJobKind.SAVE, TierJobKind.LOAD)


class TierWorker:
    """Worker that moves pages between device memory, host memory and storage, with a queue for each direction."""

    def __init__(
        self,
        copier: Copier,
        store: PageStore | None,
        global_rank: int,
        leader_address: str,
        open_outbox: Callable[[], Outbox],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Start the queues, each with its own outbox.

        Args:
            store: None if there is no storage.
            on_failure: called on a queue's thread with the exception that ended it.
        """
        self._copier = copier
        self._store = store
        self._global_rank = global_rank
        self._events: dict[int, Event | None] = {}
        """Events by job id. A job's copies start after its event."""
        self._loads: dict[int, LayerwiseLoad] = {}
        """Layerwise loads by job id."""
        names = ("saves", "loads", "reads", "writes") if store else ("saves", "loads")
        self._queues = {
            name: _JobQueue(f"hicache-{name}", leader_address, open_outbox(), self._do, self._refuse, on_failure)
            for name in names
        }

    def submit(self, job: TierJob) -> None:
        """Queue a job that runs after all earlier steps. Call this between steps."""
        if job.kind in _COPIES:
            self._events[job.job_id] = self._copier.memory.record_event()
        self._queues[JOB_QUEUES[job.kind]].put(job)

    def submit_layerwise(self, job: TierJob) -> LayerwiseLoad:
        """Queue a load for the next step. The step waits for each layer before it reads that layer."""
        load = self._loads[job.job_id] = LayerwiseLoad()
        self.submit(job)
        return load

    def close(self) -> None:
        """Finish running jobs, and discard queued jobs."""
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
        except TransferError as error:  # bytes may still arrive, so the pages must not be given back
            raise PeerLostError(f"tier job {job.job_id} cannot read the host memory of a peer: {error}") from error
        except Exception as error:  # the leader must learn that these pages are missing
            _log.warning("tier job %d (%s) failed: %r", job.job_id, job.kind, error)
            failures["error"] += 1
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
        assert job.timeout_s is not None, "the job has no timeout"
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
        """Run a storage job for the pages that this rank owns. Other pages count as done."""
        assert self._store is not None, f"{job.kind} without storage"
        assert job.timeout_s is not None, f"{job.kind} without a timeout"
        until_s = since_s + job.timeout_s
        owned = [page for page in job.pages if self._copier.owns(page)]
        if job.kind is TierJobKind.LOOK_UP:
            found = self._store.look_up(owned, until_s, failures)
        else:
            use = self._store.fetch if job.kind is TierJobKind.FETCH else self._store.store
            found = use(owned, self._copier.host_page, until_s, failures)
        num_bytes = sum(self._copier.bytes_of(page) for page, is_done in zip(owned, found, strict=True) if is_done)
        outcomes = iter(found)
        return [next(outcomes) if self._copier.owns(page) else True for page in job.pages], num_bytes


Work = Callable[[TierJob, float], TierJobResult]
"""Function that runs a job, given how many seconds the job has waited. An error ends the rank."""
Refuse = Callable[[TierJob], TierJobResult]
"""Function that returns the result of a job that waited too long to start."""


class _JobQueue:
    """Queue of jobs: one thread runs them in order, and another refuses late ones.

    A hanging job stays open, since its pages may still be written to. Jobs queued after it are refused when their
    timeouts have passed.
    """

    def __init__(
        self,
        name: str,
        leader_address: str,
        outbox: Outbox,
        work: Work,
        refuse: Refuse,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Start the threads. The queue owns the outbox. ``on_failure`` gets the error that ends a thread."""
        self._leader_address = leader_address
        self._outbox = outbox
        self._work = work
        self._refuse = refuse
        self._on_failure = on_failure
        self._changed = threading.Condition()
        """Lock that guards the fields below and the outbox."""
        self._waiting: deque[tuple[TierJob, float]] = deque()
        """Jobs with their arrival times."""
        self._is_busy = self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=[self._do_jobs], name=name, daemon=True),
            threading.Thread(target=self._run, args=[self._refuse_jobs], name=f"{name}-late", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: TierJob) -> None:
        with self._changed:
            self._waiting.append((job, time.monotonic()))
            self._changed.notify_all()

    def stop(self) -> None:
        """Finish the running job, and discard queued jobs."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the running job after ``stop``. Return False on a timeout; the thread then ends with the process."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._outbox.close()
        return True

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # a rank that cannot report its jobs must end
            self._on_failure(error)

    def _do_jobs(self) -> None:
        while (item := self._next()) is not None:
            job, since_s = item
            result = self._work(job, time.monotonic() - since_s)
            with self._changed:
                send_or_log(self._outbox, self._leader_address, result)

    def _next(self) -> tuple[TierJob, float] | None:
        """Return the next job once there is one. Return None once the queue is stopped."""
        with self._changed:
            self._is_busy = False
            self._changed.wait_for(lambda: self._waiting or self._is_stopped)
            if self._is_stopped:
                return None
            self._is_busy = True
            self._changed.notify_all()
            return self._waiting.popleft()

    def _refuse_jobs(self) -> None:
        with self._changed:
            while not self._is_stopped:
                now_s = time.monotonic()
                late = [item for item in self._waiting if self._is_busy and _end_s(item) <= now_s]
                for item in late:
                    self._waiting.remove(item)
                    send_or_log(self._outbox, self._leader_address, self._refuse(item[0]))
                end_s = min(map(_end_s, self._waiting), default=inf) if self._is_busy else inf
                self._changed.wait(end_s - now_s if end_s < inf else None)


def _end_s(item: tuple[TierJob, float]) -> float:
    """Return the time at which a waiting job is refused."""
    job, since_s = item
    return inf if job.timeout_s is None else since_s + job.timeout_s
