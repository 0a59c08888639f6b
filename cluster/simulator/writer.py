"""The sender thread on virtual time: it writes page by page, fails, and leaves bytes on the way when it dies.

It keeps the promises of ``transfer.sender.SenderThread``, whose place it takes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.simulator.memory import Memory
from cluster.simulator.network import machine_of
from cluster.simulator.surroundings import Surroundings
from cluster.simulator.timeline import Event
from cluster.spec.ids import Room
from cluster.spec.registry import Endpoint
from cluster.spec.transfer_messages import PageDigests
from transfer.page_range import total_bytes
from transfer.sender import Dropped, Outcome, SendJob, Write, WriteFailed, Written

WRITE_TIMEOUT_S = 5.0
"""How long a write to a machine that is cut off tries."""

_Copy = tuple[str, int, int]
"""Session of the target pool, source page, target page."""


@dataclass(frozen=True, slots=True)
class _Work:
    """The job that is being written."""

    job: SendJob
    digests: list[PageDigests]
    num_bytes: int
    copies: Iterator[_Copy]
    """Those that are still to be made."""


class VirtualWriter:
    """Writes jobs in the order they come, one page at a time."""

    def __init__(
        self,
        around: Surroundings,
        source: Memory,
        page_bytes: int,
        when_running: Callable[[Event], None],
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        """``when_running`` lets something happen now, or when its process is no longer paused."""
        self._around = around
        self._machine = machine_of(source.session)
        self._source = source
        self._page_bytes = page_bytes
        self._when_running = when_running
        self._on_outcome = on_outcome
        self._queue: deque[SendJob | Dropped] = deque()
        self._barred: set[tuple[Room, int]] = set()
        self._is_busy = False
        self._on_way: tuple[SendJob, _Copy] | None = None
        """Handed to the wire and not yet at its target."""

    @property
    def is_idle(self) -> bool:
        """Nothing is queued or running."""
        return not self._queue and not self._is_busy

    def send(self, job: SendJob) -> None:
        """See ``SenderThread``."""
        self._enqueue(job)

    def drop(self, room: Room, generation: int) -> None:
        """See ``SenderThread``."""
        self._barred.add((room, generation))
        self._enqueue(Dropped(room, generation))

    def forget(self, target: Endpoint) -> None:
        """Nothing is remembered of a target."""

    def close(self) -> None:
        """Die: what is queued is lost, what is on the way arrives or does not."""
        self._queue.clear()
        if self._on_way is not None:
            self._straggle(*self._on_way)
        self._on_way = None

    def _enqueue(self, item: SendJob | Dropped) -> None:
        self._queue.append(item)
        if not self._is_busy:
            self._is_busy = True
            self._around.after(0.0, partial(self._when_running, self._next))

    def _next(self) -> None:
        if self._source.is_gone:
            return
        self._is_busy = bool(self._queue)
        if not self._queue:
            return
        item = self._queue.popleft()
        if isinstance(item, Dropped):
            self._barred.discard((item.room, item.generation))
            self._end(item)
        elif (item.room, item.generation) in self._barred:
            self._next()
        else:
            digests, writes = item.make_ready(), item.make_writes()
            num_bytes = sum(total_bytes(write.spans) for write in writes)
            self._write(_Work(item, digests, num_bytes, self._copies(writes)))

    def _write(self, work: _Work) -> None:
        """Start the next copy of a job, or end it."""
        job = work.job
        if self._source.is_gone:
            return
        if (job.room, job.generation) in self._barred:
            self._next()
            return
        copy = next(work.copies, None)
        if copy is None:
            self._end(Written(job.room, job.generation, job.num_pages, work.num_bytes, work.digests))
            return
        self._on_way = (job, copy)
        hazards, random = self._around.hazards, self._around.random
        is_slow = random.random() < hazards.slow_write
        delay_s = random.uniform(1.0, 15.0) if is_slow else hazards.slowness * random.uniform(1e-4, 1e-2)
        event = partial(self._arrive, work, copy)
        self._around.after(delay_s, partial(self._when_running, event))

    def _arrive(self, work: _Work, copy: _Copy) -> None:
        if self._source.is_gone:
            return
        job = work.job
        target = self._around.memories[copy[0]]
        is_cut = self._around.network.is_cut(self._machine, machine_of(target.session))
        fails = self._around.random.random() < self._around.hazards.fail_write
        if target.is_gone or is_cut or fails:
            self._around.happened["fail_write"] += fails
            event = partial(self._when_running, partial(self._fail, job, copy))
            self._around.after(WRITE_TIMEOUT_S if is_cut else 0.0, event)
            return
        self._land(job, copy, self._source.copy_out(copy[1]))
        self._on_way = None
        self._write(work)

    def _fail(self, job: SendJob, copy: _Copy) -> None:
        if self._source.is_gone:
            return
        self._barred.add((job.room, job.generation))
        self._straggle(job, copy)
        self._on_way = None
        self._end(WriteFailed(job.room, job.generation, f"page {copy[2]} of {copy[0]} could not be written"))

    def _end(self, outcome: Outcome) -> None:
        self._on_outcome(outcome)
        self._next()

    def _straggle(self, job: SendJob, copy: _Copy) -> None:
        """Bytes that nobody waits for any more may arrive all the same, within ``settle_s``."""
        settle_s = self._around.shape.settle_s
        if settle_s and self._around.random.random() < 0.5:
            delay_s = self._around.random.uniform(0, settle_s * 0.99)
            self._around.after(delay_s, partial(self._land, job, copy, self._source.copy_out(copy[1])))

    def _land(self, job: SendJob, copy: _Copy, sent: bytes) -> None:
        session, _, page = copy
        target = self._around.memories[session]
        if target.is_gone:
            return
        self._around.tickets.check_write(target, page, job.room, job.generation)
        self._around.trace.add(session, "page", page, "<-", self._source.session, "room", job.room)
        target.copy_in(page, self._flipped(sent))

    def _flipped(self, sent: bytes) -> bytes:
        """What arrives of a page: now and then one bit is another."""
        random = self._around.random
        if not self._around.hazards.flip or random.random() >= self._around.hazards.flip:
            return sent
        self._around.happened["flip"] += 1
        place, arrived = random.randrange(len(sent)), bytearray(sent)
        arrived[place] ^= 1 << random.randrange(8)
        return bytes(arrived)

    def _copies(self, writes: Sequence[Write]) -> Iterator[_Copy]:
        """The pages of spans."""
        size = self._page_bytes
        for write in writes:
            for span in write.spans:
                for offset in range(0, span.num_bytes, size):
                    source, target = span.source_offset + offset, span.target_offset + offset
                    yield write.target.session, source // size, target // size
