"""Thread that writes pages to peers while the main thread computes. It knows rooms, but not pages."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from cluster.spec.ids import Room
from cluster.spec.registry import Endpoint
from cluster.spec.transfer_messages import PageDigests
from transfer.backends.interface import Region, TransferBackend
from transfer.page_range import Span, batches, total_bytes

BATCH_SPANS = 256
"""Maximum spans per backend call: enough to keep a network busy, and few enough that a cancellation, which waits for
the running call, is quick.
"""


@dataclass(frozen=True, slots=True)
class Write:
    """Spans for one peer."""

    peer: Endpoint
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendJob:
    """Pages of one transfer to write, as spans."""

    room: Room
    prepare: Callable[[], tuple[Sequence[Write], list[PageDigests]]]
    """Callable that returns the writes and the digests of the completed pages. The sender thread calls it when the job
    starts, since it is slow for many pages.
    """
    num_pages: int
    """Number of pages that this job completes at their targets."""


@dataclass(frozen=True, slots=True)
class Written:
    """Outcome of a completed job. All of its bytes have reached their targets."""

    room: Room
    num_pages: int
    num_bytes: int
    digests: list[PageDigests] = field(default_factory=list)
    start_s: float = field(default=0.0, compare=False)
    """Time at which writing started, from ``time.monotonic``."""
    end_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Outcome of a failed job. The transfer's later jobs are skipped."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Outcome of ``cancel``: no job of this transfer is queued or running."""

    room: Room


Outcome = Written | WriteFailed | Cancelled


class SpanWriter(Protocol):
    """Interface of ``SenderThread``; see there for its methods."""

    def send(self, job: SendJob) -> None: ...
    def cancel(self, room: Room) -> None: ...
    def forget(self, peer: Endpoint) -> None: ...
    def close(self) -> None: ...


class SenderThread:
    """Thread that runs jobs in order and reports their outcomes.

    No job of a transfer may be sent after the transfer was cancelled or has failed.
    """

    def __init__(
        self,
        backend: TransferBackend,
        source: Region,
        on_outcome: Callable[[Outcome], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Start the thread.

        Args:
            source: region that all spans are read from. The bytes of a job must not change before its outcome.
            on_failure: called on the sender thread with the exception that ended it.
        """
        self._backend = backend
        self._source = source
        self._on_outcome = on_outcome
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._barred: set[Room] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    def send(self, job: SendJob) -> None:
        """Queue a job. Its outcome is Written or WriteFailed; jobs of a cancelled transfer have none."""
        self._queue.put(partial(self._send, job))

    def cancel(self, room: Room) -> None:
        """Stop writing for a transfer. The outcome Cancelled confirms the cancellation."""
        self._barred.add(room)
        self._queue.put(partial(self._confirm_cancel, room))

    def forget(self, peer: Endpoint) -> None:
        """Release the backend's resources for a dead peer after the jobs queued so far."""
        self._queue.put(partial(self._backend.forget, peer))

    def close(self) -> None:
        """Skip queued jobs, finish the running batch, and wait for the thread. Safe to call twice."""
        self._is_closing = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (call := self._queue.get()) is not None:
                call()
        except Exception as error:  # a rank that cannot send must end
            self._on_failure(error)

    def _confirm_cancel(self, room: Room) -> None:
        self._barred.discard(room)
        self._on_outcome(Cancelled(room))

    def _send(self, job: SendJob) -> None:
        start_s = time.monotonic()
        try:
            writes, digests = job.prepare()
            is_whole = self._write(job, writes)
        # only this transfer fails; others continue
        except Exception as error:
            self._barred.add(job.room)
            self._on_outcome(WriteFailed(job.room, str(error) or repr(error)))
            # This runs after every queued job of the transfer.
            self._queue.put(partial(self._barred.discard, job.room))
            return
        if is_whole:
            num_bytes = sum(total_bytes(write.spans) for write in writes)
            end_s = time.monotonic()
            self._on_outcome(Written(job.room, job.num_pages, num_bytes, digests, start_s, end_s))

    def _write(self, job: SendJob, writes: Sequence[Write]) -> bool:
        """Return whether the job was written completely. A barred transfer ends it early."""
        for write in writes:
            for batch in batches(write.spans, BATCH_SPANS):
                if self._is_stopped(job):
                    return False
                self._backend.write(self._source, write.peer, batch)
        return not self._is_stopped(job)

    def _is_stopped(self, job: SendJob) -> bool:
        return self._is_closing or job.room in self._barred
