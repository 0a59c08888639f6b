"""Sending side of transfers: a session per room on each prefill rank, and the thread that writes pages to peers.

A session is a state machine without I/O: events in, page pairs and messages out. The thread writes while the main
thread computes, and knows rooms, but not pages.
"""

import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from cluster.spec.errors import Moves, move
from cluster.spec.ids import Peer, Room
from cluster.spec.kv import NO_PAGE, pages_for
from cluster.spec.registry import Endpoint
from cluster.spec.step_messages import Destination, SendReport
from cluster.spec.transfer_messages import Done, PageDigests, SendState
from transfer.backends.interface import Region, TransferBackend
from transfer.page_assignment import PagePair, PageShare
from transfer.page_range import Span, batches, total_bytes

BATCH_SPANS = 256
"""Maximum number of spans per backend call: enough to keep a network busy, and few enough that a cancellation, which
waits for the running call, is quick.
"""
_MOVES: Moves[SendState] = {
    SendState.SENDING: frozenset({SendState.DRAINING, SendState.SENT, SendState.FAILED}),
    SendState.DRAINING: frozenset({SendState.DRAINED, SendState.FAILED}),
    SendState.SENT: frozenset(),
    SendState.DRAINED: frozenset(),
    SendState.FAILED: frozenset(),
}


class SenderSession:
    """One prefill rank's part of a transfer.

    The KV sender calls ``advance`` for cached pages and after each chunk, and passes the pages to the sender thread. It
    reports the thread's outcomes through ``written``, ``failed`` and ``drained``. The source pages must not change
    until ``is_over``. Then the KV sender sends ``done``, if not None, to decode, and ``report`` to its leader.
    """

    def __init__(
        self,
        *,
        room: Room,
        destination: Destination,
        prefill: Peer,
        sender_rank: int,
        page_size: int,
        owned: Sequence[int],
        share: PageShare,
    ) -> None:
        """Start a transfer.

        Args:
            owned: indices, within the request, of the pages that this rank owns.
            share: part of the pages that this rank sends, selected by their ids in decode.
        """
        self.num_pages = pages_for(destination.num_tokens, page_size)
        for pages in destination.pages:
            assert len(pages) + destination.num_held_pages == self.num_pages, f"room {room}: wrong number of pages"
        assert not owned or (owned[0] >= destination.num_held_pages and owned[-1] < self.num_pages), (
            f"room {room}: {owned}"
        )
        self.room = room
        self.destination = destination
        self.state = SendState.SENDING
        self.reason = ""
        self.num_pages_written = 0
        self.num_bytes_written = 0
        self.write_s = 0.0
        self._digests: list[PageDigests] = []
        self._prefill = prefill
        self._sender_rank = sender_rank
        self._page_size = page_size
        self._owned = owned
        self._share = share
        self._next_owned = 0
        """Number of owned pages that are complete, including pages that this rank does not send."""
        self._num_handed = 0
        self.saw_last_chunk = False
        """True once the entire prompt has been computed."""

    @property
    def is_over(self) -> bool:
        """Return whether this rank will write nothing more for this transfer."""
        return not _MOVES[self.state]

    def advance(self, page_tables: Sequence[Sequence[int]], computed_len: int) -> list[PagePair]:
        """Return the newly completed pages that this rank must send now.

        Args:
            page_tables: the request's page ids in this replica by lifetime, covering at least the computed tokens.
            computed_len: number of leading tokens that have KV. The prompt's last token completes a partial last page.
        """
        assert computed_len <= self.destination.num_tokens, (
            f"room {self.room}: {computed_len} of {self.destination.num_tokens} tokens"
        )
        if self.state is not SendState.SENDING:
            return []
        self.saw_last_chunk = computed_len == self.destination.num_tokens
        complete = self.num_pages if self.saw_last_chunk else computed_len // self._page_size
        first, self._next_owned = self._next_owned, bisect_left(self._owned, complete)
        pairs = self._pairs(page_tables, self._owned[first : self._next_owned])
        self._num_handed += len(pairs)
        self._end_if_written("advance")
        return pairs

    def rest(self, page_tables: Sequence[Sequence[int]]) -> list[PagePair]:
        """Return the pages that the final ``advance`` would return, without changing state."""
        pages = self._owned[self._next_owned :] if self.state is SendState.SENDING else ()
        return self._pairs(page_tables, pages)

    def written(
        self, num_pages: int, num_bytes: int, digests: Iterable[PageDigests] = (), seconds: float = 0.0
    ) -> None:
        """Record that pages have reached their targets, and how long that took."""
        self.write_s += seconds
        self.num_pages_written += num_pages
        self.num_bytes_written += num_bytes
        self._digests += digests
        assert self.num_pages_written <= self._num_handed, f"room {self.room}: more pages written than sent"
        if self.state is SendState.SENDING:
            self._end_if_written("written")

    def failed(self, reason: str) -> None:
        """Record a failed write, after which the sender thread skips the transfer's other jobs."""
        if not self.is_over:
            self.reason = reason
            self._move(SendState.FAILED, "failed")

    def cancel(self) -> None:
        """Stop sending pages. The transfer is over once the sender thread confirms the cancellation."""
        if self.state is SendState.SENDING:
            self._move(SendState.DRAINING, "cancel")

    def drained(self) -> None:
        """Record the sender thread's confirmation that no job of this transfer is queued or running."""
        if self.state is SendState.DRAINING:
            self._move(SendState.DRAINED, "drained")

    def report(self) -> SendReport:
        return SendReport(
            room=self.room,
            sender_rank=self._sender_rank,
            state=self.state,
            reason=self.reason,
            num_bytes=self.num_bytes_written,
            write_s=self.write_s,
        )

    def done(self) -> Done | None:
        """Return the final message to decode. None if some pages were not sent or this rank has no pages to send."""
        if self.state is not SendState.SENT or not self._share.remainders:
            return None
        return Done(
            room=self.room,
            prefill=self._prefill,
            decode_incarnation=self.destination.decode.incarnation,
            sender_rank=self._sender_rank,
            num_pages=self.num_pages_written,
            num_bytes=self.num_bytes_written,
            digests=self._digests,
        )

    def _pairs(self, page_tables: Sequence[Sequence[int]], positions: Sequence[int]) -> list[PagePair]:
        first = self.destination.num_held_pages
        return [
            PagePair(lifetime, sources[position], targets[position - first])
            for lifetime, (sources, targets) in enumerate(zip(page_tables, self.destination.pages, strict=True))
            for position in positions
            if targets[position - first] != NO_PAGE and self._share.has(targets[position - first])
        ]

    def _end_if_written(self, event: str) -> None:
        if self.saw_last_chunk and self.num_pages_written == self._num_handed:
            self._move(SendState.SENT, event)

    def _move(self, state: SendState, event: str) -> None:
        self.state = move(_MOVES, self.state, state, event, f"sender of room {self.room}")


@dataclass(frozen=True, slots=True)
class Write:
    """Spans to write to one peer."""

    peer: Endpoint
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendJob:
    """Job that writes some pages of one transfer."""

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
    """Outcome of a failed job, which moves no more bytes. The transfer's later jobs are skipped."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Outcome of ``cancel``: no job of this transfer is queued or running."""

    room: Room


Outcome = Written | WriteFailed | Cancelled


class SpanWriter(Protocol):
    """Interface of ``SenderThread``, which documents the methods."""

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
        self._failing: set[Room] = set()
        """Barred rooms whose failure is reported once the backend moves no more of their bytes."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    def send(self, job: SendJob) -> None:
        """Queue a job. Its outcome is Written or WriteFailed; jobs of a cancelled transfer have no outcome."""
        self._queue.put(partial(self._send, job))

    def cancel(self, room: Room) -> None:
        """Stop writing for a transfer. The outcome Cancelled confirms the cancellation, unless a job has failed."""
        self._barred.add(room)
        self._queue.put(partial(self._confirm_cancel, room))

    def forget(self, peer: Endpoint) -> None:
        """Release the backend's resources for a dead peer once the jobs queued so far are over."""
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
        if room in self._failing:
            return  # the outcome will be WriteFailed
        self._barred.discard(room)
        self._on_outcome(Cancelled(room))

    def _send(self, job: SendJob) -> None:
        if self._is_stopped(job):
            return  # after a failure, the pages may already belong to another request
        start_s = time.monotonic()
        writes: Sequence[Write] = ()
        try:
            writes, digests = job.prepare()
            is_whole = self._write(job, writes)
        # only this transfer fails; others continue
        except Exception as error:
            self._barred.add(job.room)
            self._failing.add(job.room)
            failure = WriteFailed(job.room, str(error) or repr(error))
            # Jobs for other peers do not wait.
            threading.Thread(target=self._drain, args=(writes, failure), name="kv-drain", daemon=True).start()
            return
        if is_whole:
            num_bytes = sum(total_bytes(write.spans) for write in writes)
            end_s = time.monotonic()
            self._on_outcome(Written(job.room, job.num_pages, num_bytes, digests, start_s, end_s))

    def _drain(self, writes: Sequence[Write], failure: WriteFailed) -> None:
        try:
            for write in writes:
                self._backend.drain(write.peer)
            self._queue.put(partial(self._report, failure))
        except Exception as error:  # a rank that cannot report a failure must end
            self._on_failure(error)

    def _report(self, failure: WriteFailed) -> None:
        self._failing.remove(failure.room)
        self._on_outcome(failure)
        # This runs after every queued job of the transfer.
        self._queue.put(partial(self._barred.discard, failure.room))

    def _write(self, job: SendJob, writes: Sequence[Write]) -> bool:
        """Write a job. Return False if it stopped early because the transfer has ended or the thread is closing."""
        for write in writes:
            for batch in batches(write.spans, BATCH_SPANS):
                if self._is_stopped(job):
                    return False
                self._backend.write(self._source, write.peer, batch)
        return not self._is_stopped(job)

    def _is_stopped(self, job: SendJob) -> bool:
        return self._is_closing or job.room in self._barred
