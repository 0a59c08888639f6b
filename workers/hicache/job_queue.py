"""Queue of tier jobs, with one thread that runs them in order and one that reports each."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from cluster.channel import Outbox
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.tiers import TierJob, TierJobResult

_log = logging.getLogger(__name__)

Work = Callable[[TierJob, float], TierJobResult]
"""Function that runs a job which has waited this many seconds; must not raise."""
Refuse = Callable[[TierJob], TierJobResult]
"""Function that returns the result of a job that is not started any more."""


class JobQueue:
    """Jobs of one kind of memory; other queues and the forward pass go on meanwhile.

    A hanging job stays open, since its pages may still be written to, and the jobs behind it are refused when their
    time is over.
    """

    def __init__(self, name: str, leader_address: str, outbox: Outbox, work: Work, refuse: Refuse) -> None:
        """Start the threads; the queue closes the outbox."""
        self._leader_address = leader_address
        self._outbox = outbox
        self._work = work
        self._refuse = refuse
        self._events = queue.SimpleQueue[tuple[TierJob, float] | TierJobResult | None]()
        """Queue of jobs with their arrival times, results, and None for the end."""
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
        """Finish the running job, and drop the others."""
        self._events.put(None)

    def wait_ended(self, timeout_s: float) -> bool:
        """Return whether the running job ends in this time after ``stop``; if not, its thread ends with the process."""
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
        """Return when the next waiting job is to be refused, in seconds from now."""
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
