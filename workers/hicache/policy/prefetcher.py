"""Reads of stored pages into host memory, for requests that will need them. Sans I/O.

A look-up in storage comes first, so that host memory evicts nothing for absent pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from cluster.spec.hicache_config import PrefetchPolicy
from cluster.spec.ids import Room
from cluster.spec.tiers import TierJobKind, TierPage
from workers.cache.page_lists import Lifetimes
from workers.hicache.policy.host_index import HostIndex
from workers.hicache.policy.jobs import Breaker, Outcome, TierJobs

BATCH_PAGES = 32
"""Most pages of one job."""
MAX_OPEN = 2
"""Most open jobs of one request."""
MIN_TOKENS = 256
"""Tokens below which a request computes rather than reads, as in SGLang: they take less time than a look-up."""
BASE_S = 1.0
"""Longest wait under ``timeout`` for any number of tokens: some look-ups and reads of a slow disk."""
S_PER_1K_TOKENS = 0.25
"""Additional wait under ``timeout`` for every 1000 tokens, as in SGLang: about as long as computing them takes."""
LONGEST_S = 30.0
"""Longest time that storage is read for one request under the policies without a timeout of their own."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """Pages of one request that storage may have."""

    keys: Sequence[bytes]
    """Keys of all leading pages of the request, of the first lifetime."""
    num_here: int
    """Leading pages behind which it could continue without storage."""
    pages: list[TierPage]
    """Pages that the tiers above lack, in order: those looked up, then those to be read."""
    deadline_s: float
    """Time when the request stops waiting."""
    late_s: float
    """Time when storage is too slow; nothing more is read then."""
    num_wanted: int = 0
    """Leading ones of ``pages`` that are stored, as far as is known."""
    num_submitted: int = 0
    num_open: int = 1
    """Open jobs; the first one looks up what is stored."""
    shared: list[bytes] = field(default_factory=list)
    """Pages in flight for another request."""
    held: list[bytes] = field(default_factory=list)
    """Host pages held for this request."""
    is_forgotten: bool = False


class Prefetcher:
    """Prefetcher that reads pages by policy, and decides how long each request waits for them."""

    def __init__(
        self,
        policy: PrefetchPolicy,
        lifetimes: Lifetimes,
        is_here: Callable[[bytes], bool],
        host: HostIndex,
        jobs: TierJobs,
        breaker: Breaker,
        min_tokens: int = MIN_TOKENS,
    ) -> None:
        """Build a prefetcher; ``is_here`` tells of a page whether the device or host memory has it."""
        self._policy = policy
        self._min_tokens = min_tokens
        self._lifetimes = lifetimes
        self._is_here = is_here
        self._host = host
        self._jobs = jobs
        self._breaker = breaker
        self._prefetches: dict[Room, _Prefetch] = {}
        self.num_late = 0
        """Requests that started without pages that storage did not deliver in time."""

    def expect(self, room: Room, keys: Sequence[bytes], num_here: int, now_s: float) -> None:
        """Read what the tiers above lack of a request, which could continue behind ``num_here`` pages without."""
        tokens = (len(keys) - num_here) * self._lifetimes.page_size
        if tokens < self._min_tokens or self._breaker.is_open(now_s):
            return
        keys = keys[: num_here + self._host.num_pages // 2]
        pages = self._lacking(keys)
        timeout_s = self._timeout_s(tokens)
        prefetch = _Prefetch(keys, num_here, pages, now_s + timeout_s, now_s + (timeout_s or LONGEST_S))
        self._prefetches[room] = prefetch
        on_end = partial(self._on_looked_up, prefetch)
        self._jobs.submit(TierJobKind.LOOK_UP, pages, on_end, prefetch.late_s - now_s)

    def is_waiting(self, room: Room, now_s: float) -> bool:
        """Return whether the request is to wait for more of its pages."""
        prefetch = self._prefetches.get(room)
        return prefetch is not None and now_s < prefetch.deadline_s and self._is_open(prefetch)

    def next_deadline_s(self) -> float | None:
        """Return when the next request stops waiting."""
        return min((each.deadline_s for each in self._prefetches.values() if self._is_open(each)), default=None)

    def forget(self, room: Room, now_s: float) -> None:
        """Note that the request starts, or never will; pages in flight still come."""
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
            # Every prefix that is longer, up to the one that was looked up, needs the missing page.
            prefetch.keys = prefetch.keys[: prefetch.pages[outcome.num_leading].depth]
            prefetch.pages = self._lacking(prefetch.keys)
        if (len(prefetch.keys) - prefetch.num_here) * self._lifetimes.page_size >= self._min_tokens:
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
        """Reserve host pages for the next pages, except those that are here or in flight for another request."""
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
                self._host.drop(page.key)
        self._touch(prefetch)
        if not all(outcome.done):
            prefetch.num_wanted = prefetch.num_submitted
        self._fetch_more(prefetch, outcome.now_s)

    def _lacking(self, keys: Sequence[bytes]) -> list[TierPage]:
        """Return the pages that the tiers above lack to continue behind these."""
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
        """Note an outcome; one that comes too late was already noted as a failure."""
        if outcome.now_s < prefetch.late_s:
            self._breaker.note(outcome.now_s, is_success=not outcome.failures["error"])
