"""One rank's part of the tiers, in place of ``workers.hicache.tier_worker``: the real copier moves pages during steps.

Host memory dies with its process; storage, which all replicas share, does not.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.simulator.memory import TORN, Memory, Violation, copy_spans
from cluster.simulator.process import Process
from cluster.spec.config import TransferBackendName
from cluster.spec.errors import TransferError
from cluster.spec.registry import Endpoint, KvOwnership, RankRow
from cluster.spec.tiers import TierJob, TierJobKind, TierJobResult, TierPage
from transfer.backends.interface import Region
from transfer.plan import Span, local_page
from workers.cache.layer_arrivals import LayerArrivals
from workers.hicache.copier import Copier

_QUEUES = {
    TierJobKind.SAVE: "saves",
    TierJobKind.LOAD: "loads",
    TierJobKind.LOOK_UP: "reads",
    TierJobKind.FETCH: "reads",
    TierJobKind.STORE: "writes",
}


@dataclass(slots=True)
class _Queued:
    job: TierJob
    arrivals: LayerArrivals | None = None
    """Present if a step waits for these pages."""


class VirtualTierWorker:
    """Queues that do one job after another."""

    def __init__(
        self,
        process: Process,
        leader_address: str,
        rows: Sequence[RankRow],
        memory: Memory,
        on_layers: Callable[[], None],
    ) -> None:
        """``rows`` are those of all ranks of the replica; ``on_layers`` is called when a step can read more layers."""
        self._process, self._around, self._leader_address = process, process.around, leader_address
        self._row, self._memory, self._on_layers = memory.row, memory, on_layers
        self._queues: dict[str, deque[_Queued]] = {queue: deque() for queue in _QUEUES.values()}
        self._pages = _DevicePages(memory)
        self._copier: Copier | None = None
        if memory.row.host_endpoint is not None:
            device = Region(memoryview(memory.pool), memory.row.endpoint)
            host = Region(memoryview(memory.host), memory.row.host_endpoint)
            backend = _Reads(self._around.memories, memory)
            self._copier = Copier(rows, memory.row.global_rank, self._pages, device, host, backend)  # type: ignore[arg-type]

    @property
    def is_idle(self) -> bool:
        """Whether no job is open."""
        return not any(self._queues.values())

    def submit(self, job: TierJob) -> None:
        """Do a job, after those that came before it."""
        self._enqueue(_Queued(job))

    def submit_layerwise(self, job: TierJob) -> LayerArrivals:
        """Load pages that a step waits for, layer after layer. Such copies do not fail."""
        arrivals = LayerArrivals()
        self._enqueue(_Queued(job, arrivals))
        return arrivals

    def _enqueue(self, item: _Queued) -> None:
        queue = self._queues[_QUEUES[item.job.kind]]
        queue.append(item)
        if len(queue) == 1:
            self._begin(queue)

    def _begin(self, queue: deque[_Queued]) -> None:
        job, arrivals, random = queue[0].job, queue[0].arrivals, self._around.random
        if arrivals is not None:
            assert self._copier is not None
            self._copier.load_layerwise(job.pages, None, arrivals)
            self._fill_later(queue, random.uniform(1e-3, 0.1) / self._row.layout.num_layers)
        else:
            longest_s = random.choice([0.01, 0.1, 3.0 if self._around.hazards.slow_move else 0.1])
            self._process.after(random.uniform(1e-3, longest_s), partial(self._end, queue))

    def _fill_later(self, queue: deque[_Queued], layer_s: float) -> None:
        """Let the next layer come, or end the job when all have."""
        if self._pages.filling:
            self._process.after(layer_s, partial(self._fill_layer, queue, layer_s))
            return
        job = queue[0].job
        self._around.moved["fill"] += len(job.pages)
        self._answer(queue, [True] * len(job.pages), fails=False)

    def _fill_layer(self, queue: deque[_Queued], layer_s: float) -> None:
        if self._row.global_rank == 0:  # others may be behind their leader
            self._check_held(queue[0].job)
        self._pages.filling.popleft()()
        self._on_layers()
        self._fill_later(queue, layer_s)

    def _end(self, queue: deque[_Queued]) -> None:
        job, hazards = queue[0].job, self._around.hazards
        fails = self._around.random.random() < hazards.fail_move
        self._around.happened["fail_move"] += fails
        if job.kind is TierJobKind.LOAD:
            fails = not self._load(job.pages, fails=fails)
            done = [not fails or not self._has(page) for page in job.pages]
            self._check_held(job)
        else:
            done = [self._move(job.kind, page, fails=fails) for page in job.pages]
        self._answer(queue, done, fails=fails)

    def _answer(self, queue: deque[_Queued], done: list[bool], *, fails: bool) -> None:
        job = queue.popleft().job
        self._around.moved[job.kind] += len(job.pages)
        failures = {"error": len(done)} if fails else {}
        answer = TierJobResult(job_id=job.job_id, global_rank=self._row.global_rank, done=done, failures=failures)
        self._process.send(self._leader_address, answer)
        if queue:
            self._begin(queue)

    def _has(self, page: TierPage) -> bool:
        """Return whether a device page is on this rank."""
        assert self._copier is not None
        return self._row.ownership is KvOwnership.REPLICATED or self._copier.owns(page)

    def _check_held(self, job: TierJob) -> None:
        for page in job.pages:
            assert page.device is not None
            if not self._memory.allocator.is_held(page.device):
                raise Violation(f"{self._memory.session} loads page {page.device}, which no sequence holds alone")

    def _load(self, pages: Sequence[TierPage], *, fails: bool) -> bool:
        assert self._copier is not None
        try:
            if fails:
                raise TransferError("a copy fails")
            self._copier.load(pages, None)
        except TransferError:
            for page in filter(self._has, pages):
                assert page.device is not None
                self._memory.put(local_page(self._row, page.device), bytes([TORN]) * self._row.layout.page_bytes)
            return False
        return True

    def _move(self, kind: TierJobKind, page: TierPage, *, fails: bool) -> bool:
        """This rank's part of one page; true where it has none."""
        assert self._copier is not None
        if not self._copier.owns(page):
            return True
        if kind is TierJobKind.LOOK_UP:
            return self._stored(page) is not None and not fails
        assert page.host is not None
        slot = page.host // self._row.sizes.cp
        if kind is TierJobKind.STORE:
            return not fails and self._store(page.key, bytes(self._memory.filled_host_page(slot)))
        self._memory.filled.add(slot)
        if kind is TierJobKind.SAVE and not fails:
            # As it is now; the leader throws the copy away if the page was given up meanwhile.
            return self._copier.save([page], None) > 0
        found = None if fails else self._stored(page)
        self._copier.host_page(page)[:] = found if found is not None else bytes([TORN]) * self._row.layout.page_bytes
        return found is not None

    def _pieces(self, key: bytes) -> list[tuple[bytes, int, int]]:
        """The names of a page in storage: ranks of other layouts know them, too."""
        layout = self._row.layout
        heads = range(layout.first_head, layout.first_head + layout.num_heads)
        layers = range(layout.first_layer, layout.first_layer + layout.num_layers)
        return [(key, head, layer) for head in heads for layer in layers]

    def _stored(self, page: TierPage) -> bytes | None:
        pieces = [self._around.storage.get(name) for name in self._pieces(page.key)]
        found = [piece for piece in pieces if piece is not None]
        return b"".join(found) if len(found) == len(pieces) else None

    def _store(self, key: bytes, content: bytes) -> bool:
        size = self._row.layout.layer_bytes
        for number, name in enumerate(self._pieces(key)):
            piece = content[number * size : (number + 1) * size]
            if self._around.storage.setdefault(name, piece) != piece:
                raise Violation(f"{self._memory.session} stores the KV of one page under the key of another")
        return True


class _DevicePages:
    """The copier's view of a rank's pages; layers of a fill are copied when their time has come."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.filling: deque[Callable[[], None]] = deque()

    def record_event(self) -> None:
        """Return nothing: whatever was started is done."""

    def save(self, pairs: Sequence[tuple[int, int]], after: None) -> None:  # noqa: ARG002 - see ``record_event``
        for page, slot in pairs:
            self._memory.host_page(slot)[:] = self._memory.page(page)

    def load(self, pairs: Sequence[tuple[int, int]], after: None) -> None:  # noqa: ARG002
        for page, slot in pairs:
            self._memory.put(page, bytes(self._memory.filled_host_page(slot)))

    def load_layerwise(
        self,
        pairs: Sequence[tuple[int, int]],
        elsewhere: Sequence[int],  # noqa: ARG002 - they are where they are read to
        read: Callable[[slice], None],
        after: None,  # noqa: ARG002
        arrivals: LayerArrivals,
    ) -> None:
        """Plan the copies of each layer."""

        def copy(layer: int) -> None:
            pieces = self._memory.pieces(range(layer, layer + 1))
            for page, slot in pairs:
                image = bytes(self._memory.filled_host_page(slot))
                self._memory.put_pieces(page, image, pieces)
            read(slice(layer, layer + 1))
            arrivals.note(1, None)

        self.filling += [partial(copy, layer) for layer in range(self._memory.row.layout.num_layers)]

    def load_from_region(self, pages: Sequence[int], after: None) -> None:
        """They are there."""


class _Reads:
    """The half of a transfer backend that reads peers' host memory."""

    def __init__(self, memories: dict[str, Memory], mine: Memory) -> None:
        self._memories, self._mine = memories, mine

    def read(self, source: Endpoint, target: Region, spans: Sequence[Span]) -> None:  # noqa: ARG002 - it is our pool
        """Copy spans of a peer's host pool to our device pool.

        Raises:
            TransferError: the peer is dead, and its memory is not on this host.
        """
        peer = self._memories[source.session]
        if peer.is_gone and source.backend != TransferBackendName.SHARED_MEMORY:
            raise TransferError(f"{source.session} is gone")
        for span in spans:
            peer.filled_host_page(span.source_offset // peer.row.layout.page_bytes)
        copy_spans(peer.host, self._mine.pool, spans)
