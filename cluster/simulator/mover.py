"""One rank's part of the tiers, as ``workers.hicache.tier_worker`` does it: jobs are done beside the steps.

Host memory dies with its process; storage, which all replicas share, does not.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial

from cluster.simulator.memory import Memory, Violation
from cluster.simulator.process import Process
from cluster.simulator.scenario import PAGE_SIZE
from cluster.spec.registry import KvOwnership, RankRow
from cluster.spec.tiers import TierJob, TierJobKind, TierJobResult, TierPage
from transfer.plan import local_page

_QUEUES = {
    TierJobKind.SAVE: "saves",
    TierJobKind.LOAD: "loads",
    TierJobKind.LOOK_UP: "reads",
    TierJobKind.FETCH: "reads",
    TierJobKind.STORE: "writes",
}
_TORN = b"\xff" * PAGE_SIZE
"""What is left where a copy failed."""


class VirtualMover:
    """Queues that do one job after another."""

    def __init__(
        self, process: Process, leader_address: str, rows: Sequence[RankRow], cp_rank: int, memory: Memory
    ) -> None:
        """``rows`` are those of all ranks of the DP rank."""
        self._process, self._around, self._leader_address = process, process.around, leader_address
        self._rows, self._row, self._memory = rows, rows[cp_rank], memory
        self._queues: dict[str, deque[TierJob]] = {name: deque() for name in _QUEUES.values()}
        self._num_filling = 0

    @property
    def is_idle(self) -> bool:
        """Whether no job is open."""
        return not self._num_filling and not any(self._queues.values())

    def take(self, job: TierJob) -> None:
        """Queue a job."""
        jobs = self._queues[_QUEUES[job.kind]]
        jobs.append(job)
        if len(jobs) == 1:
            self._begin(jobs)

    def fill(self, job: TierJob) -> float:
        """Load pages that a step waits for; return how long that takes. Such copies do not fail."""
        seconds = self._around.random.uniform(1e-3, 0.1)
        self._num_filling += 1
        self._process.after(seconds, partial(self._end_fill, job))
        return seconds

    def _end_fill(self, job: TierJob) -> None:
        self._num_filling -= 1
        self._around.moved["fill"] += len(job.pages)
        self._report(job, fails=False)

    def _begin(self, jobs: deque[TierJob]) -> None:
        longest_s = self._around.random.choice([0.01, 0.1, 3.0 if self._around.hazards.slow_move else 0.1])
        self._process.after(self._around.random.uniform(1e-3, longest_s), partial(self._end, jobs))

    def _end(self, jobs: deque[TierJob]) -> None:
        job = jobs.popleft()
        fails = self._around.random.random() < self._around.hazards.fail_move
        self._around.happened["fail_move"] += fails
        self._report(job, fails=fails)
        if jobs:
            self._begin(jobs)

    def _report(self, job: TierJob, *, fails: bool) -> None:
        self._around.moved[job.kind] += len(job.pages)
        done = [self._move(job.kind, page, fails=fails) for page in job.pages]
        result = TierJobResult(
            job_id=job.job_id,
            global_rank=self._row.global_rank,
            done=done,
            failures={"error": len(done)} if fails else {},
        )
        self._process.send(self._leader_address, result)

    def _move(self, kind: TierJobKind, page: TierPage, *, fails: bool) -> bool:
        """Do this rank's part of one page; true where it has none."""
        is_owner = page.index % self._row.sizes.cp == self._row.coords.cp
        if kind is TierJobKind.LOAD:
            return self._load(page, fails=fails) if is_owner or self._row.ownership is KvOwnership.REPLICATED else True
        if not is_owner:
            return True
        if kind is TierJobKind.LOOK_UP:
            return page.key in self._around.storage and not fails
        assert page.host is not None
        slot = page.host // self._row.sizes.cp
        if kind is TierJobKind.STORE:
            return not fails and self._store(page.key, _filled(self._memory, slot))
        source = self._around.storage.get(page.key) if kind is TierJobKind.FETCH else self._on_device(page)
        self._memory.host[slot] = _TORN if fails or source is None else source
        return not fails and source is not None

    def _load(self, page: TierPage, *, fails: bool) -> bool:
        assert page.host is not None
        assert page.device is not None
        cp = self._row.sizes.cp
        peer = self._around.memories[self._rows[page.host % cp].endpoint.session]
        if not self._memory.allocator.is_held(page.device):
            raise Violation(f"{self._memory.session} loads page {page.device}, which no sequence holds alone")
        is_there = not peer.is_gone and not fails
        tokens = _filled(peer, page.host // cp) if is_there else _TORN
        self._memory.put(local_page(self._row, page.device), tokens)
        return is_there

    def _store(self, key: bytes, tokens: bytes) -> bool:
        if len(tokens) != PAGE_SIZE or self._around.storage.setdefault(key, tokens) != tokens:
            raise Violation(f"{self._memory.session} stores the tokens of one page under the key of another")
        return True

    def _on_device(self, page: TierPage) -> bytes:
        """As it is now; the leader throws the copy away if the page was given up meanwhile."""
        assert page.device is not None
        return self._memory.tokens(local_page(self._row, page.device))


def _filled(memory: Memory, slot: int) -> bytes:
    if slot not in memory.host:
        raise Violation(f"host page {slot} of {memory.session} is read, which nobody has filled")
    return memory.host[slot]
