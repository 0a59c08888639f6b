"""Prefetches of stored pages into host memory for waiting requests. Sans I/O.

A prefetch starts with a look-up, so that host memory evicts nothing for pages that are not in storage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from cluster.spec.hicache_config import PrefetchPolicy
from cluster.spec.ids import Room
from cluster.spec.tiers import TierJobKind, TierPage
from workers.cache.lifetimes import Lifetimes
from workers.hicache.policy.host_index import HostIndex
from workers.hicache.policy.jobs import Breaker, Outcome, TierJobs

BATCH_PAGES = 32
"""Maximum number of pages per job."""
MAX_OPEN = 2
"""Maximum number of open jobs per request."""
MIN_TOKENS = 256
"""Minimum number of tokens to prefetch, as in SGLang. Computing fewer tokens is faster than looking them up."""
BASE_S = 1.0
"""Constant part of the wait under ``timeout``: enough for a few look-ups and reads from a slow disk."""
S_PER_1K_TOKENS = 0.25
"""Additional wait per 1000 tokens under ``timeout``, as in SGLang. Computing 1000 tokens takes about as long."""
LONGEST_S = 30.0
"""Maximum reading time per request under the other policies."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """Pages of one request that may be in storage."""

    keys: Sequence[bytes]
    """Keys of the request's leading pages in the first lifetime."""
    num_here: int
    """Number of leading pages that the request could use without storage."""
    pages: list[TierPage]
    """Pages missing from device and host memory, in order."""
    deadline_s: float
    """Time at which the request stops waiting."""
    late_s: float
    """Time after which no further read starts."""
    num_wanted: int = 0
    """Number of leading pages known to be in storage."""
    num_submitted: int = 0
    num_open: int = 1
    """Number of open jobs. The first job is a look-up."""
    shared: list[bytes] = field(default_factory=list)
    """Keys of pages that are being read for another request."""
    held: list[bytes] = field(default_factory=list)
    """Host pages held for this request."""
    is_forgotten: bool = False


class Prefetcher:
    """Policy that decides which pages to read from storage and how long each request waits for them."""

    def __init__(
        self,
        policy: PrefetchPolicy,
        lifetimes: Lifetimes,
        is_here: Callable[[bytes], bool],
        host: HostIndex,
        jobs: TierJobs,
        breaker: Breaker,
    ) -> None:
        """Create a prefetcher. ``is_here`` returns whether device or host memory has a page."""
        self.min_tokens = MIN_TOKENS
        self._policy = policy
        self._lifetimes = lifetimes
        self._is_here = is_here
        self._host = host
        self._jobs = jobs
        self._breaker = breaker
        self._prefetches: dict[Room, _Prefetch] = {}
        self.num_late = 0
        """Number of requests that started without some stored pages because storage was too slow."""

    def expect(self, room: Room, keys: Sequence[bytes], num_here: int, now_s: float) -> None:
        """Start prefetching the pages that a request lacks after its first ``num_here`` pages."""
        tokens = (len(keys) - num_here) * self._lifetimes.page_size
        if tokens < self.min_tokens or self._breaker.is_open(now_s):
            return
        keys = keys[: num_here + self._host.num_pages // 2]
        pages = self._lacking(keys)
        timeout_s = self._timeout_s(tokens)
        prefetch = _Prefetch(keys, num_here, pages, now_s + timeout_s, now_s + (timeout_s or LONGEST_S))
        self._prefetches[room] = prefetch
        on_end = partial(self._on_looked_up, prefetch)
        self._jobs.submit(TierJobKind.LOOK_UP, pages, on_end, prefetch.late_s - now_s)

    def is_waiting(self, room: Room, now_s: float) -> bool:
        """Return whether the request should wait for more pages."""
        prefetch = self._prefetches.get(room)
        return prefetch is not None and now_s < prefetch.deadline_s and self._is_open(prefetch)

    def next_deadline_s(self, now_s: float) -> float | None:
        """Return the earliest time at which a request stops waiting. None if no request waits."""
        waiting = (each for each in self._prefetches.values() if now_s < each.deadline_s and self._is_open(each))
        return min((each.deadline_s for each in waiting), default=None)

    def forget(self, room: Room, now_s: float) -> None:
        """Record that a request is starting or was dropped. Open reads continue."""
        prefetch = self._prefetches.pop(room, None)
        if prefetch is None:
            return
        prefetch.is_forgotten = True
        self._host.release(prefetch.held)
        self._touch(prefetch)
        if prefetch.num_open and now_s >= prefetch.late_s:
            self.num_late += 1
            self._breaker.note(now_s, is_success=False)

    def _is_open(self, prefetch: _Prefetch) -> bool:
        prefetch.shared = [key for key in prefetch.shared if key in self._host and self._host.page_of(key) is None]
        return prefetch.num_open > 0 or bool(prefetch.shared)

    def _timeout_s(self, tokens: int) -> float:
        match self._policy:
            case PrefetchPolicy.BEST_EFFORT:
                return 0.0
            case PrefetchPolicy.WAIT_COMPLETE:
                return LONGEST_S
            case PrefetchPolicy.TIMEOUT:
                return BASE_S + S_PER_1K_TOKENS * tokens / 1000

    def _on_looked_up(self, prefetch: _Prefetch, outcome: Outcome) -> None:
        prefetch.num_open -= 1
        self._note(prefetch, outcome)
        if outcome.num_leading < len(prefetch.pages):
            # Every longer prefix needs the missing page.
            prefetch.keys = prefetch.keys[: prefetch.pages[outcome.num_leading].depth]
            prefetch.pages = self._lacking(prefetch.keys)
        if (len(prefetch.keys) - prefetch.num_here) * self._lifetimes.page_size >= self.min_tokens:
            prefetch.num_wanted = len(prefetch.pages)
            self._fetch_more(prefetch, outcome.now_s)

    def _fetch_more(self, prefetch: _Prefetch, now_s: float) -> None:
        while (
            prefetch.num_open < MAX_OPEN
            and prefetch.num_submitted < prefetch.num_wanted
            and now_s < prefetch.late_s
            and not prefetch.is_forgotten
        ):
            pages = self._next_batch(prefetch)
            if pages:
                prefetch.num_open += 1
                on_end = partial(self._on_fetched, prefetch, pages)
                self._jobs.submit(TierJobKind.FETCH, pages, on_end, prefetch.late_s - now_s)

    def _next_batch(self, prefetch: _Prefetch) -> list[TierPage]:
        """Reserve host pages for the next pages, except those in host memory or being read for another request."""
        batch: list[TierPage] = []
        while prefetch.num_submitted < prefetch.num_wanted and len(batch) < BATCH_PAGES:
            page = prefetch.pages[prefetch.num_submitted]
            if page.key not in self._host:
                host = self._host.reserve(page.key, page.index, page.depth)
                if host is None:
                    prefetch.num_wanted = prefetch.num_submitted
                    break
                batch.append(msgspec.structs.replace(page, host=host))
            elif self._host.page_of(page.key) is None:
                prefetch.shared.append(page.key)
            prefetch.num_submitted += 1
        return batch

    def _on_fetched(self, prefetch: _Prefetch, pages: list[TierPage], outcome: Outcome) -> None:
        prefetch.num_open -= 1
        self._note(prefetch, outcome)
        for page, is_done in zip(pages, outcome.done, strict=True):
            if is_done:
                self._keep(prefetch, page.key, outcome.now_s)
            else:
                self._host.free(page.key)
        self._touch(prefetch)
        if not all(outcome.done):
            prefetch.num_wanted = prefetch.num_submitted
        self._fetch_more(prefetch, outcome.now_s)

    def _lacking(self, keys: Sequence[bytes]) -> list[TierPage]:
        """Return the pages missing from device and host memory that a request needs to continue after this prefix."""
        return [page for page in self._lifetimes.prefix_pages(keys) if not self._is_here(page.key)]

    def _touch(self, prefetch: _Prefetch) -> None:
        self._host.touch(self._lifetimes.prefix_keys(prefetch.keys))

    def _keep(self, prefetch: _Prefetch, key: bytes, now_s: float) -> None:
        self._host.fill(key)
        self._host.note_fetched(key, now_s)
        if not prefetch.is_forgotten:
            self._host.hold([key])
            prefetch.held.append(key)

    def _note(self, prefetch: _Prefetch, outcome: Outcome) -> None:
        """Report an outcome to the breaker. A late outcome has already been counted as a failure."""
        if outcome.now_s < prefetch.late_s:
            self._breaker.note(outcome.now_s, is_success=not outcome.failures["error"])
