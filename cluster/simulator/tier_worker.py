"""Tiers of one rank, in place of ``workers.hicache.tier_worker``. The real copier moves the pages.

Host memory is lost with its process. Storage is shared by all replicas and survives them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from cluster.simulator.environment import Process
from cluster.simulator.memory import TORN, Memory, Violation, copy_spans
from cluster.spec.config import TransferBackendName
from cluster.spec.errors import TransferError
from cluster.spec.registry import Endpoint, RankRecord
from cluster.spec.tiers import JOB_QUEUES, TierJob, TierJobKind, TierJobResult, TierPage
from transfer.backends.interface import Region
from transfer.page_assignment import local_page
from transfer.page_range import Span
from workers.hicache.copier import Copier
from workers.memory.layerwise_load import LayerwiseLoad

_Queue = deque[tuple[TierJob, LayerwiseLoad | None]]
"""Jobs, with the progress of those loads that a step waits for."""


class VirtualTierWorker:
    """Queues of one rank's tier jobs. Each queue runs one job at a time."""

    def __init__(
        self,
        process: Process,
        leader_address: str,
        records: Sequence[RankRecord],
        memory: Memory,
        on_layers: Callable[[], None],
    ) -> None:
        """Create the queues. ``on_layers`` is called when a step can read more layers."""
        self._process, self._env, self._leader_address = process, process.env, leader_address
        self._record, self._memory, self._on_layers = memory.record, memory, on_layers
        self._queues: dict[str, _Queue] = {queue: deque() for queue in JOB_QUEUES.values()}
        backend = _Reads(self._env.memories, memory)
        self._copier = Copier(records, memory.record.global_rank, _TierMemory(memory), backend)  # type: ignore[arg-type]

    @property
    def is_idle(self) -> bool:
        return not any(self._queues.values())

    def submit(self, job: TierJob, load: LayerwiseLoad | None = None) -> None:
        queue = self._queues[JOB_QUEUES[job.kind]]
        queue.append((job, load))
        if len(queue) == 1:
            self._begin(queue)

    def submit_layerwise(self, job: TierJob) -> LayerwiseLoad:
        """Load pages layer by layer for a step that waits for them. Such loads do not fail."""
        load = LayerwiseLoad()
        self.submit(job, load)
        return load

    def _begin(self, queue: _Queue) -> None:
        (job, load), random = queue[0], self._env.random
        if load is not None:
            layers = self._copier.layer_loads(job.pages, None, load)
            layer_s = random.uniform(1e-3, 0.1) / self._record.layout.num_layers
            self._process.after(layer_s, partial(self._load_layers, queue, load, layers, layer_s))
        else:
            longest_s = random.choice([0.01, 0.1, 3.0 if self._env.hazards.slow_move else 0.1])
            self._process.after(random.uniform(1e-3, longest_s), partial(self._end, queue))

    def _load_layers(self, queue: _Queue, load: LayerwiseLoad, layers: Iterator[None], layer_s: float) -> None:
        job, _ = queue[0]
        if self._record.global_rank == 0:  # followers can lag behind their leader
            self._check_held(job)
        next(layers)
        self._on_layers()
        if load.num_here < self._record.layout.num_layers:
            self._process.after(layer_s, partial(self._load_layers, queue, load, layers, layer_s))
            return
        self._env.moved["layerwise load"] += len(job.pages)
        self._answer(queue, [True] * len(job.pages), fails=False)

    def _end(self, queue: _Queue) -> None:
        (job, _), hazards = queue[0], self._env.hazards
        fails = self._env.random.random() < hazards.fail_move
        self._env.happened["fail_move"] += fails
        if job.kind is TierJobKind.LOAD:
            fails = not self._load(job.pages, fails=fails)
            done = [not fails or not self._copier.holds(page) for page in job.pages]
            self._check_held(job)
        else:
            done = [self._move(job.kind, page, fails=fails) for page in job.pages]
        self._answer(queue, done, fails=fails)

    def _answer(self, queue: _Queue, done: list[bool], *, fails: bool) -> None:
        job, _ = queue.popleft()
        self._env.moved[job.kind] += len(job.pages)
        failures = {"error": len(done)} if fails else {}
        answer = TierJobResult(job_id=job.job_id, global_rank=self._record.global_rank, done=done, failures=failures)
        self._process.send(self._leader_address, answer)
        if queue:
            self._begin(queue)

    def _check_held(self, job: TierJob) -> None:
        for page in job.pages:
            assert page.device is not None
            if not self._memory.allocator.is_held(page.device):
                raise Violation(
                    f"{self._memory.session} loads page {page.device}, which is not held by exactly one sequence"
                )

    def _load(self, pages: Sequence[TierPage], *, fails: bool) -> bool:
        try:
            if fails:
                raise TransferError("the copy failed (simulated)")
            self._copier.load(pages, None)
        except TransferError:
            for page in filter(self._copier.holds, pages):
                assert page.device is not None
                self._memory.put(local_page(self._record, page.device), bytes([TORN]) * self._record.layout.page_bytes)
            return False
        return True

    def _move(self, kind: TierJobKind, page: TierPage, *, fails: bool) -> bool:
        """Move this rank's part of a page. Return whether that part is complete."""
        if not self._copier.owns(page):
            return True
        if kind is TierJobKind.LOOK_UP:
            return self._stored(page) is not None and not fails
        slot = self._copier.slot(page)
        if kind is TierJobKind.STORE:
            return not fails and self._store(page, bytes(self._memory.filled_host_page(slot)))
        self._memory.filled.add(slot)
        if kind is TierJobKind.SAVE and not fails:
            # This copies the current bytes. If the page has been evicted, the leader discards the copy.
            return self._copier.save([page], None) > 0
        found = None if fails else self._stored(page)
        self._copier.host_page(page)[:] = found if found is not None else bytes([TORN]) * self._copier.bytes_of(page)
        return found is not None

    def _pieces(self, page: TierPage) -> list[tuple[bytes, str, int, int]]:
        """Return the names of a page's pieces in storage. They do not depend on the layout."""
        groups = [group for group in self._record.layout.groups if group.lifetime == page.lifetime]
        return [
            (page.key, group.name, head, layer) for group in groups for head in group.heads for layer in group.layers
        ]

    def _stored(self, page: TierPage) -> bytes | None:
        pieces = [self._env.storage.get(name) for name in self._pieces(page)]
        found = [piece for piece in pieces if piece is not None]
        return b"".join(found) if len(found) == len(pieces) else None

    def _store(self, page: TierPage, content: bytes) -> bool:
        sizes = {group.name: group.layer_bytes for group in self._record.layout.groups}
        for name in self._pieces(page):
            piece, content = content[: sizes[name[1]]], content[sizes[name[1]] :]
            if self._env.storage.setdefault(name, piece) != piece:
                raise Violation(f"{self._memory.session} stores a page under the key of another page")
        return True


class _TierMemory:
    """Pages of a rank as the copier sees them, in place of ``workers.memory.peer_memory``."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.region = Region(memoryview(memory.pool), memory.record.endpoint)

    def host_page(self, slot: int) -> memoryview:
        return self._memory.host_page(slot)

    def save(self, pages: Sequence[int], slots: Sequence[int], after: None) -> None:  # noqa: ARG002
        for page, slot in zip(pages, slots, strict=True):
            self._memory.host_page(slot)[:] = self._memory.page(page)

    def load(
        self,
        pages: Sequence[int],
        slots: Sequence[int],
        lifetime: int,
        layers: range | None,
        after: None,  # noqa: ARG002
    ) -> None:
        layout = self._memory.record.layout
        wanted = layout.layers if layers is None else layers
        layers = range(wanted.start - layout.first_layer, wanted.stop - layout.first_layer)
        pieces = self._memory.pieces(layers, lifetime)
        for page, slot in zip(pages, slots, strict=True):
            self._memory.put_pieces(page, bytes(self._memory.filled_host_page(slot)), pieces)

    def take_in(self, pages: Sequence[int], lifetime: int, layers: range | None, after: None) -> None:
        """Do nothing, because peers' pages are read directly into their destination."""

    def wait_loads(self) -> None:
        """Do nothing, because loads are complete when they return."""


class _Reads:
    """Transfer backend that reads peers' host memory."""

    def __init__(self, memories: dict[str, Memory], mine: Memory) -> None:
        self._memories, self._mine = memories, mine

    def read(self, source: Endpoint, target: Region, spans: Sequence[Span]) -> None:  # noqa: ARG002 - always our pool
        """Copy spans from a peer's host pool to our device pool.

        Raises:
            TransferError: the peer is dead and its host memory is not shared.
        """
        peer = self._memories[source.session]
        if peer.is_gone and source.backend != TransferBackendName.SHARED_MEMORY:
            raise TransferError(f"{source.session} is gone")
        for span in spans:
            peer.filled_host_page(span.source_offset // peer.record.layout.page_bytes)
        copy_spans(peer.host, self._mine.pool, spans)
