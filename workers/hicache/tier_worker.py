"""Tier jobs on one rank, run concurrently with the forward pass."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from cluster.channel import Outbox
from cluster.spec.errors import TransferError
from cluster.spec.tiers import TierJob, TierJobKind, TierJobResult
from workers.device import Event
from workers.hicache.copier import Copier
from workers.hicache.job_queue import JobQueue
from workers.hicache.storage.page_store import PageStore
from workers.memory.layerwise_load import LayerwiseLoad

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for running jobs when a worker ends, since storage may hang."""

_COPIES = (TierJobKind.SAVE, TierJobKind.LOAD)
_QUEUES = {
    TierJobKind.SAVE: "saves",
    TierJobKind.LOAD: "loads",
    TierJobKind.LOOK_UP: "reads",
    TierJobKind.FETCH: "reads",
    TierJobKind.STORE: "writes",
}


class TierWorker(Protocol):
    """Interface of the worker loop to the tiers."""

    def submit(self, job: TierJob) -> None:
        """Queue a job to run after all earlier steps."""
        ...

    def submit_layerwise(self, job: TierJob) -> LayerwiseLoad:
        """Queue a load for the next step, which waits for each layer that it reads."""
        ...

    def close(self) -> None:
        """Finish running jobs, and drop those that wait."""
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
    """Tier worker that moves pages between device, host memory and storage, with a queue for each kind of move."""

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
        """Event after which a job's copies start, by job id."""
        self._loads: dict[int, LayerwiseLoad] = {}
        """Layerwise loads by job id."""
        names = ("saves", "loads", "reads", "writes") if store else ("saves", "loads")
        self._queues = {
            name: JobQueue(f"hicache-{name}", leader_address, open_outbox(), self._do, self._refuse) for name in names
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
        except Exception as error:  # whatever it is, the leader must learn that these pages are missing
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
        """Return the result of a storage job that waited too long behind another."""
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
            except Exception as error:  # the step cannot go on without the pages, so the rank fails
                load.fail(error)
                raise
        return [True] * len(job.pages), num_bytes

    def _use_storage(self, job: TierJob, since_s: float, failures: Counter[str]) -> tuple[list[bool], int]:
        """Run a storage job for the pages that this rank owns; its part of the others is done."""
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
