"""Sender thread, which writes pages to peers while the main thread computes. It knows rooms, but no pages."""

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
"""Spans handed to the backend at once: enough to keep a network busy, few enough that a cancellation, which waits
for one batch, is quick."""


@dataclass(frozen=True, slots=True)
class Write:
    """Spans for one peer."""

    peer: Endpoint
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendJob:
    """Pages of one transfer, as the spans that carry them."""

    room: Room
    make_writes: Callable[[], Sequence[Write]]
    """Function that creates the writes, called on the sender thread when the job starts: it takes a while for many
    pages.
    """
    num_pages: int
    """Number of pages complete at their targets after it, for the outcome."""
    make_ready: Callable[[], list[PageDigests]] = list
    """Function called right before the writes are created; returns the digests of these pages, for the outcome."""


@dataclass(frozen=True, slots=True)
class Written:
    """Outcome of a completed job: everything is at its target."""

    room: Room
    num_pages: int
    num_bytes: int
    digests: list[PageDigests] = field(default_factory=list)
    start_s: float = field(default=0.0, compare=False)
    """Start of its writing, by ``time.monotonic``."""
    end_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Outcome of a failed job; nothing of this transfer is written any more."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Response to ``cancel``: nothing of this transfer is queued or running."""

    room: Room


Outcome = Written | WriteFailed | Cancelled


class Writer(Protocol):
    """Interface of ``SenderThread``, which documents its methods."""

    def send(self, job: SendJob) -> None: ...
    def cancel(self, room: Room) -> None: ...
    def forget(self, peer: Endpoint) -> None: ...
    def close(self) -> None: ...


class SenderThread:
    """Writes jobs in order. Outcomes are reported on this thread, so the callback must only pass them on.

    The caller sends no job of a transfer that was cancelled or has failed.
    """

    def __init__(
        self,
        backend: TransferBackend,
        source: Region,
        on_outcome: Callable[[Outcome], None],
        on_failure: Callable[[Exception], None],
        batch_spans: int = BATCH_SPANS,
    ) -> None:
        """Start the thread.

        Args:
            source: base of all spans; its bytes must not change until the outcome.
            batch_spans: maximum spans given to the backend at once; a cancellation waits for one such batch.
            on_failure: called with the exception if the thread ends without ``close``; nothing is written after it.
        """
        self._backend = backend
        self._source = source
        self._batch_spans = batch_spans
        self._on_outcome = on_outcome
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._barred: set[Room] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    def send(self, job: SendJob) -> None:
        """Queue one job; answered by Written or WriteFailed, or by nothing if the transfer was cancelled or failed."""
        self._queue.put(partial(self._send, job))

    def cancel(self, room: Room) -> None:
        """Stop writing for a transfer; answered by Cancelled once that is certain."""
        self._barred.add(room)
        self._queue.put(partial(self._confirm_cancel, room))

    def forget(self, peer: Endpoint) -> None:
        """Let the backend forget a peer that is gone, after the jobs queued so far."""
        self._queue.put(partial(self._backend.forget, peer))

    def close(self) -> None:
        """Skip queued jobs, let the running batch end, and wait for the thread; safe to call twice."""
        self._is_closing = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (call := self._queue.get()) is not None:
                call()
        except Exception as error:  # a rank that cannot send must not live on
            self._on_failure(error)

    def _confirm_cancel(self, room: Room) -> None:
        self._barred.discard(room)
        self._on_outcome(Cancelled(room))

    def _send(self, job: SendJob) -> None:
        start_s = time.monotonic()
        try:
            digests = job.make_ready()
            writes = job.make_writes()
            is_whole = self._write(job, writes)
        # other transfers continue, and this one reports the reason
        except Exception as error:
            self._barred.add(job.room)
            self._on_outcome(WriteFailed(job.room, str(error) or repr(error)))
            # Queued after every job of the transfer.
            self._queue.put(partial(self._barred.discard, job.room))
            return
        if is_whole:
            num_bytes = sum(total_bytes(write.spans) for write in writes)
            end_s = time.monotonic()
            self._on_outcome(Written(job.room, job.num_pages, num_bytes, digests, start_s, end_s))

    def _write(self, job: SendJob, writes: Sequence[Write]) -> bool:
        """Return whether the whole job was written: it ends early if the transfer is barred."""
        for write in writes:
            for batch in batches(write.spans, self._batch_spans):
                if self._is_closing or job.room in self._barred:
                    return False
                self._backend.write(self._source, write.peer, batch)
        return not (self._is_closing or job.room in self._barred)
