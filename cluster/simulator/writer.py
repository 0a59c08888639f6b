"""Writer in virtual time, in place of ``transfer.sender.SenderThread``.

It writes page by page, can fail, and leaves bytes in flight when it dies.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.simulator.environment import Environment, Event, machine_of
from cluster.simulator.memory import Memory, copy_spans
from cluster.simulator.scenario import PAGE_SIZE
from cluster.spec.ids import Room
from cluster.spec.registry import Endpoint
from cluster.spec.transfer_messages import PageDigests
from transfer.page_range import Span, total_bytes
from transfer.sender import Cancelled, Outcome, SendJob, Write, WriteFailed, Written

WRITE_TIMEOUT_S = 5.0
"""Time for which a write to an unreachable machine is retried."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Part of a job that goes to one page."""

    session: str
    page: int
    spans: list[Span]
    share: float
    """Copied fraction of the page's KV in all heads and layers; scales hazards so that the layout does not matter."""


@dataclass(frozen=True, slots=True)
class _Work:
    job: SendJob
    digests: list[PageDigests]
    num_bytes: int
    copies: Iterator[_Copy]


class VirtualWriter:
    """Writer that carries out send jobs in order, one page at a time."""

    def __init__(
        self,
        env: Environment,
        source: Memory,
        when_running: Callable[[Event], None],
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        """Create the writer. ``when_running`` runs an event now, or when its process resumes."""
        self._env = env
        self._machine = machine_of(source.session)
        self._source = source
        self._when_running = when_running
        self._on_outcome = on_outcome
        self._queue: deque[SendJob | Cancelled | Room] = deque()
        """Jobs and cancellations in order. The room of a failed transfer follows its last job."""
        self._stopped_rooms: set[Room] = set()
        self._is_busy = False
        self._in_flight: tuple[SendJob, _Copy] | None = None
        """Copy in flight, with its job; None if there is none."""

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._is_busy

    def send(self, job: SendJob) -> None:
        self._enqueue(job)

    def cancel(self, room: Room) -> None:
        self._stopped_rooms.add(room)
        self._enqueue(Cancelled(room))

    def forget(self, target: Endpoint) -> None:
        """Do nothing, because there are no connections."""

    def close(self) -> None:
        """Drop the queued jobs. The copy in flight arrives completely, in part or not at all."""
        self._queue.clear()
        if self._in_flight is not None:
            self._deliver_late(*self._in_flight)
        self._in_flight = None

    def _enqueue(self, item: SendJob | Cancelled | Room) -> None:
        self._queue.append(item)
        if not self._is_busy:
            self._is_busy = True
            self._env.after(0.0, partial(self._when_running, self._next))

    def _next(self) -> None:
        if self._source.is_gone:
            return
        self._is_busy = bool(self._queue)
        if not self._queue:
            return
        item = self._queue.popleft()
        if isinstance(item, Cancelled):
            self._stopped_rooms.discard(item.room)
            self._end(item)
        elif isinstance(item, int):
            self._stopped_rooms.discard(item)
            self._next()
        elif item.room in self._stopped_rooms:
            self._next()
        else:
            writes, digests = item.prepare()
            num_bytes = sum(total_bytes(write.spans) for write in writes)
            self._env.moved["early"] += not item.num_pages
            self._write(_Work(item, digests, num_bytes, self._copies(writes)))

    def _write(self, work: _Work) -> None:
        job = work.job
        if self._source.is_gone:
            return
        if job.room in self._stopped_rooms:
            self._next()
            return
        copy = next(work.copies, None)
        if copy is None:
            self._end(Written(job.room, job.num_pages, work.num_bytes, work.digests))
            return
        self._in_flight = (job, copy)
        hazards, random = self._env.hazards, self._env.random
        is_slow = random.random() < hazards.slow_write * copy.share
        delay_s = random.uniform(1.0, 15.0) if is_slow else hazards.slowness * random.uniform(1e-4, 1e-2) * copy.share
        event = partial(self._arrive, work, copy)
        self._env.after(delay_s, partial(self._when_running, event))

    def _arrive(self, work: _Work, copy: _Copy) -> None:
        if self._source.is_gone:
            return
        job = work.job
        target = self._env.memories[copy.session]
        is_partitioned = self._env.network.is_partitioned(self._machine, machine_of(target.session))
        fails = self._env.random.random() < self._env.hazards.fail_write * copy.share
        if target.is_gone or is_partitioned or fails:
            self._env.happened["fail_write"] += fails
            event = partial(self._when_running, partial(self._fail, job, copy))
            self._env.after(WRITE_TIMEOUT_S if is_partitioned else 0.0, event)
            return
        self._deliver(job, copy, self._source.pool)
        self._in_flight = None
        self._write(work)

    def _fail(self, job: SendJob, copy: _Copy) -> None:
        if self._source.is_gone:
            return
        self._stopped_rooms.add(job.room)
        self._queue.append(job.room)
        self._deliver_late(job, copy)
        self._in_flight = None
        self._end(WriteFailed(job.room, f"page {copy.page} of {copy.session} could not be written"))

    def _end(self, outcome: Outcome) -> None:
        self._on_outcome(outcome)
        self._next()

    def _deliver_late(self, job: SendJob, copy: _Copy) -> None:
        """Deliver an unfinished copy completely, in part or not at all, within ``settle_s``."""
        settle_s, random = self._env.shape.settle_s, self._env.random
        if settle_s and random.random() < 0.5:
            part = _Copy(copy.session, copy.page, copy.spans[: random.randint(1, len(copy.spans))], copy.share)
            event = partial(self._deliver, job, part, bytes(self._source.pool))
            self._env.after(random.uniform(0, settle_s * 0.99), event)

    def _deliver(self, job: SendJob, copy: _Copy, source: bytes | bytearray) -> None:
        target = self._env.memories[copy.session]
        if target.is_gone:
            return
        self._env.tickets.check_write(target, copy.page, job.room)
        self._env.trace.add(copy.session, "page", copy.page, "<-", self._source.session, "room", job.room)
        copy_spans(source, target.pool, copy.spans)
        self._flip(target, copy.spans)

    def _flip(self, target: Memory, spans: Sequence[Span]) -> None:
        """Sometimes change one bit of the copy that arrived."""
        random = self._env.random
        if not self._env.hazards.flip or random.random() >= self._env.hazards.flip:
            return
        self._env.happened["flip"] += 1
        span = random.choice(spans)
        target.pool[span.target_offset + random.randrange(span.num_bytes)] ^= 1 << random.randrange(8)

    def _copies(self, writes: Sequence[Write]) -> Iterator[_Copy]:
        for write in writes:
            size = self._env.memories[write.peer.session].record.layout.page_bytes
            whole = PAGE_SIZE * self._source.record.geometry.bytes_per_token
            pages: dict[int, list[Span]] = {}
            for source, target, num_bytes in write.spans:
                for offset in range(-(target % size), num_bytes, size):
                    first, last = max(offset, 0), min(offset + size, num_bytes)
                    piece = Span(source + first, target + first, last - first)
                    pages.setdefault(piece.target_offset // size, []).append(piece)
            for page, spans in pages.items():
                yield _Copy(write.peer.session, page, spans, total_bytes(spans) / whole)
