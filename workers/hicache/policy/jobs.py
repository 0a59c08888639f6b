"""Tier jobs of one replica, and a circuit breaker driven by their outcomes. Sans I/O."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.spec.tiers import (
    JOB_BOUNDS_S,
    RankWork,
    StorageFigures,
    TierJob,
    TierJobKind,
    TierJobResult,
    TierPage,
)

_MOST_FAILURES = 3
"""Number of consecutive failures at which the breaker opens."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
LATE_S = 5.0
"""Seconds past its timeout after which a storage job counts as hanging."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a finished job. No rank accesses the job's pages any more."""

    done: list[bool]
    """One flag per page: True if every rank has done its part."""
    failures: Counter[str]
    """Number of failed pages by reason, over all ranks."""
    now_s: float
    """Time at which the last rank reported."""

    @property
    def num_leading(self) -> int:
        """Return the number of pages before the first failed page."""
        return next((number for number, is_done in enumerate(self.done) if not is_done), len(self.done))


OnEnd = Callable[[Outcome], None]


@dataclass(slots=True)
class _Open:
    kind: TierJobKind
    done: list[bool]
    on_end: OnEnd
    failures: Counter[str] = field(default_factory=Counter)
    reported: set[int] = field(default_factory=set)
    due_s: float | None = None
    """Time after which the job counts as hanging."""


class TierJobs:
    """Open jobs and totals of finished jobs. Every rank reports every job exactly once."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._last_id = 0
        self._open: dict[int, _Open] = {}
        self._layerwise: TierJob | None = None
        self.outgoing: list[TierJob] = []
        """Jobs to send to all ranks."""
        self.work: dict[tuple[TierJobKind, int], RankWork] = {}
        """Totals of all results by kind and global rank."""
        self.storage: dict[int, StorageFigures] = {}
        """Latest storage metrics by global rank."""

    def submit(
        self,
        kind: TierJobKind,
        pages: Sequence[TierPage],
        on_end: OnEnd,
        timeout_s: float | None = None,
        *,
        is_layerwise: bool = False,
    ) -> None:
        """Submit a job to all ranks. Call ``on_end`` with its outcome. Layerwise jobs run during the next step."""
        self._last_id += 1
        self._open[self._last_id] = _Open(kind, [True] * len(pages), on_end)
        job = TierJob(job_id=self._last_id, kind=kind, pages=list(pages), timeout_s=timeout_s)
        if is_layerwise:
            assert self._layerwise is None, "two layerwise loads for one step"
            self._layerwise = job
        else:
            self.outgoing.append(job)

    def take_layerwise(self) -> TierJob | None:
        job, self._layerwise = self._layerwise, None
        return job

    def take_outgoing(self, now_s: float) -> list[TierJob]:
        """Return the jobs submitted since the last call. Their timeouts start now."""
        jobs, self.outgoing = self.outgoing, []
        for job in jobs:
            if job.timeout_s is not None:
                self._open[job.job_id].due_s = now_s + job.timeout_s + LATE_S
        return jobs

    def on_result(self, result: TierJobResult, now_s: float) -> bool:
        """Handle one rank's result. Return False if it belongs to no open job."""
        job = self._open.get(result.job_id)
        if job is None or result.global_rank in job.reported:
            return False
        self._count(job.kind, result)
        job.reported.add(result.global_rank)
        job.done = [ours and theirs for ours, theirs in zip(job.done, result.done, strict=True)]
        job.failures.update(result.failures)
        if len(job.reported) == self._num_ranks:
            del self._open[result.job_id]
            job.on_end(Outcome(job.done, job.failures, now_s))
        return True

    def stuck_pages(self, now_s: float) -> Counter[TierJobKind]:
        """Count the pages of hanging jobs by kind. Such pages cannot be reused until the storage calls return."""
        pages = Counter[TierJobKind]()
        for job in self._open.values():
            if job.due_s is not None and now_s >= job.due_s:
                pages[job.kind] += len(job.done)
        return pages

    def num_open(self, kind: TierJobKind) -> int:
        return sum(job.kind is kind for job in self._open.values())

    def num_unreported(self, global_rank: int) -> dict[TierJobKind, int]:
        """Count the jobs of each kind that a rank has not reported yet."""
        counts = dict.fromkeys(TierJobKind, 0)
        for job in self._open.values():
            counts[job.kind] += global_rank not in job.reported
        return counts

    def _count(self, kind: TierJobKind, result: TierJobResult) -> None:
        if result.storage is not None:
            self.storage[result.global_rank] = result.storage
        key = kind, result.global_rank
        before = self.work.get(key, RankWork(kind=kind, global_rank=result.global_rank))
        within = list(before.num_within)
        within[bisect_left(JOB_BOUNDS_S, result.waited_s + result.busy_s)] += 1
        self.work[key] = RankWork(
            kind=kind,
            global_rank=result.global_rank,
            num_jobs=before.num_jobs + 1,
            num_bytes=before.num_bytes + result.num_bytes,
            busy_s=before.busy_s + result.busy_s,
            waited_s=before.waited_s + result.waited_s,
            num_within=tuple(within),
            failures=dict(Counter(before.failures) + Counter(result.failures)),
        )


class Breaker:
    """Circuit breaker that opens while a call hangs and, for longer each time, after several consecutive failures.

    After the pause, one failure opens it again, and one success closes it.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._open_until_s = 0.0
        self._hangs = False
        self.num_opened = 0

    def is_open(self, now_s: float) -> bool:
        return self._hangs or now_s < self._open_until_s

    def note_hangs(self, *, hangs: bool) -> None:
        self.num_opened += hangs and not self._hangs
        self._hangs = hangs

    def note(self, now_s: float, *, is_success: bool) -> None:
        if is_success:
            self._num_failures = 0
            self._open_until_s = 0.0
            return
        if now_s < self._open_until_s:
            return  # a call that started before the breaker opened
        self._num_failures += 1
        if self._num_failures >= _MOST_FAILURES and not self._hangs:
            wait_s = _FIRST_PAUSE_S * 2.0 ** min(self._num_failures - _MOST_FAILURES, 10)
            self._open_until_s = now_s + min(_LONGEST_PAUSE_S, wait_s)
            self.num_opened += 1
