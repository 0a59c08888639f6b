"""Policy for copying host pages to storage. Sans I/O."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.tiers import TierJobKind, TierPage
from workers.cache.prefix_tree import PageJournal
from workers.hicache.policy.host_index import NEVER_S, STORING_S, HostIndex
from workers.hicache.policy.jobs import Breaker, Outcome, TierJobs

BATCH_PAGES = 16
"""Maximum number of pages per job."""
MAX_OPEN = 2
"""Maximum number of open jobs, whose pages are held in host memory."""
MARGIN = 1024
"""Number of pages next in line for eviction, per owner, that ``write_back`` stores ahead of time."""
TIMEOUT_S = 60.0
"""Timeout of a job. Jobs exceed it if pages arrive faster than storage can write them."""
RENEW_S = 60.0
"""Time after which a stored page is offered again at its next use, since storage evicts pages without notice."""
MAX_REPORTED = 1 << 18
"""Maximum number of stored page keys sent to a new router."""


class StorageWriter:
    """Writer that stores pages according to the write policy.

    A page that cannot be written is counted and retried at its next use, or under ``write_back`` when it is next due
    for eviction. While the breaker is open, pages wait, at most as many as there are host pages. Offering a stored page
    again costs only a look-up, since ranks write only missing pages.
    """

    def __init__(self, policy: WritePolicy, host: HostIndex, jobs: TierJobs, breaker: Breaker) -> None:
        self._policy = policy
        self._host = host
        self._jobs = jobs
        self._breaker = breaker
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._seen = -1
        """Version of the host index when ``advance`` last looked for pages to evict."""
        self._is_draining = False
        self._doubted: set[bytes] = set()
        """Pages that may have disappeared from storage. They are offered after pages that were never stored."""
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self.journal = PageJournal()
        """Keys of stored pages to report. Storage does not report evictions."""
        self.num_lost = 0
        """Number of pages that were due but could not be stored."""

    def note_saved(self, key: bytes) -> None:
        if self._policy is not WritePolicy.WRITE_BACK:
            self._wait([key])

    def note_used(self, keys: Sequence[bytes], now_s: float) -> None:
        """Record that a request starts with these pages. Host pages that may be missing from storage become due."""
        here = [key for key in keys if self._host.page_of(key) is not None]
        for key in here:
            if NEVER_S < self._host[key].stored_s <= now_s - RENEW_S:
                self._host.note_stored(key, NEVER_S)
        if self._policy is not WritePolicy.WRITE_BACK:
            self._wait(key for key in here if self._is_missing(key))

    def doubt(self) -> None:
        """Forget which pages are stored, since storage may have lost them. The policy or a drain offers them again."""
        self._doubted = set(self._host.doubt_storage())

    def drain(self, *, is_draining: bool) -> None:
        """Start or stop storing all host pages that are not in storage, whatever the policy."""
        if is_draining and not self._is_draining:
            self.doubt()
        self._is_draining = is_draining
        self._seen = -1

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def stored_keys(self) -> list[bytes]:
        return list(self._stored)

    def advance(self, now_s: float) -> None:
        """Submit due writes, unless the breaker is open."""
        if self._breaker.is_open(now_s):
            return
        if not self._waiting and self._seen != self._host.version:
            self._seen = self._host.version
            self._wait(key for key in self._next_to_go() if self._is_missing(key))
        while self._waiting and self._jobs.num_open(TierJobKind.STORE) < MAX_OPEN:
            pages = self._next_batch()
            if pages:
                self._host.hold(page.key for page in pages)
                self._jobs.submit(TierJobKind.STORE, pages, partial(self._on_stored, pages), TIMEOUT_S)

    def _is_missing(self, key: bytes) -> bool:
        return self._host[key].stored_s == NEVER_S

    def _wait(self, keys: Iterable[bytes]) -> None:
        """Queue pages, up to the number of host pages. Drop the oldest entries first."""
        for key in keys:
            self._waiting[key] = None
            if len(self._waiting) > self._host.num_pages:
                oldest, _ = self._waiting.popitem(last=False)
                self.num_lost += self._host.page_of(oldest) is None or self._is_missing(oldest)

    def _next_to_go(self) -> Iterator[bytes]:
        if self._is_draining:
            yield from sorted(self._host.filled_keys(), key=self._doubted.__contains__)
        elif self._policy is WritePolicy.WRITE_BACK:
            for owner in range(self._host.num_owners):
                yield from self._host.oldest(owner, MARGIN)

    def _next_batch(self) -> list[TierPage]:
        pages: list[TierPage] = []
        while self._waiting and len(pages) < BATCH_PAGES:
            key, _ = self._waiting.popitem(last=False)
            if self._host.page_of(key) is None:
                self.num_lost += 1
            elif self._is_missing(key):
                self._host.note_stored(key, STORING_S)
                page = self._host[key]
                pages.append(TierPage(key=key, index=page.index, depth=page.depth, host=page.page))
        return pages

    def _on_stored(self, pages: list[TierPage], outcome: Outcome) -> None:
        self._host.release(page.key for page in pages)
        is_success = not outcome.failures["error"] and (any(outcome.done) or not outcome.failures["late"])
        self._breaker.note(outcome.now_s, is_success=is_success)
        for page, is_done in zip(pages, outcome.done, strict=True):
            self._host.note_stored(page.key, outcome.now_s if is_done else NEVER_S)
            if is_done:
                self._report(page.key)
        self.num_lost += len(pages) - sum(outcome.done)

    def _report(self, key: bytes) -> None:
        """Report a newly stored page to routers."""
        if key in self._stored:
            return
        self.journal.note(key, True)
        self._stored[key] = None
        if len(self._stored) > MAX_REPORTED:
            self._stored.popitem(last=False)
