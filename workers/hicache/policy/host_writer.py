"""Policy for copying device pages to host memory. Sans I/O.

A copy neither holds its device page nor delays that page's eviction. If the page is evicted before every rank has
reported, the copy is discarded.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.tiers import TierJobKind, TierPage
from workers.cache.prefix_tree import PageJournal, PrefixTree
from workers.hicache.policy.host_index import HostIndex
from workers.hicache.policy.jobs import Outcome, TierJobs

BATCH_PAGES = 64
"""Maximum number of pages per job."""
MAX_OPEN = 4
"""Maximum number of open jobs. While further pages wait, only their keys are kept."""
SELECTIVE_HITS = 2
"""Number of requests that must find a page before ``write_through_selective`` copies it, as in SGLang."""
MARGIN = 1024
"""Number of pages next in line for eviction, per owner, that ``write_back`` saves ahead of time."""


class HostWriter:
    """Writer that saves pages by policy. Call ``advance`` whenever the device cache may have changed."""

    def __init__(self, policy: WritePolicy, tree: PrefixTree, host: HostIndex, jobs: TierJobs) -> None:
        self._policy = policy
        self._tree = tree
        self._host = host
        self._jobs = jobs
        self._journal = PageJournal()
        tree.journals.append(self._journal)
        self._waiting: deque[bytes] = deque()
        self._seen = -1, -1
        """Versions of both caches when ``_look_ahead`` last ran."""
        self._hits: Counter[bytes] = Counter()
        self.num_lost = 0
        """Number of pages that were evicted before they could be saved."""
        self._saved: list[bytes] = []
        self._received: set[bytes] = set()
        self._is_draining = False
        self._device_only: list[deque[bytes]] = [deque() for _ in range(host.num_owners)]
        """Pages by owner that exist only on the device. Filled while a replica drains under ``write_back``."""

    def note_hits(self, keys: list[bytes]) -> None:
        """Record that a request found these device pages."""
        self.note_pinned(keys)
        if self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            for key in keys:
                self._hits[key] += 1
                if self._hits[key] == SELECTIVE_HITS:
                    self._waiting.append(key)

    def note_pinned(self, keys: Sequence[bytes]) -> None:
        """Queue the pinned pages among ``keys`` that exist only on the device."""
        if self._host.pins:
            self._waiting += [key for key in self._only_on_device(keys) if key in self._host.pins]

    def note_received(self, keys: list[bytes]) -> None:
        """Record newly cached pages that came from a replica that saves them itself."""
        self._received.update(keys)

    def drain(self, *, is_draining: bool) -> None:
        """Start or stop saving all pages that exist only on the device, so that they can be stored.

        Policies other than ``write_back`` have already saved the pages worth keeping.
        """
        if is_draining == self._is_draining or self._policy is not WritePolicy.WRITE_BACK:
            return
        self._is_draining = is_draining
        self._seen = -1, -1
        for keys in self._device_only:
            keys.clear()
        if is_draining:
            self._note_device_only(self._tree.keys())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_device_only(self) -> int:
        """Return the number of pages that wait for space in host memory."""
        return sum(map(len, self._device_only))

    def advance(self) -> None:
        """Submit due saves, up to the limit of open jobs."""
        stored, removed = self._journal.take()
        received, self._received = self._received, set()
        for key in removed:
            self._hits.pop(key, None)
        if self._is_draining:
            self._note_device_only(stored)
        self.note_pinned(stored)
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._waiting += [key for key in stored if key not in received]
        elif self._policy is WritePolicy.WRITE_BACK and self._jobs.num_open(TierJobKind.SAVE) == 0:
            self._look_ahead()
        while self._waiting and self._jobs.num_open(TierJobKind.SAVE) < MAX_OPEN:
            pages = self._next_batch()
            if pages:
                entries = [self._tree.entry(page.key) for page in pages]
                self._jobs.submit(TierJobKind.SAVE, pages, partial(self._on_saved, pages, entries))

    def take_saved(self) -> list[bytes]:
        saved, self._saved = self._saved, []
        return saved

    def _look_ahead(self) -> None:
        """Queue the next pages to evict, unless nothing has changed since the last call."""
        if self._seen != (self._tree.version, self._host.version):
            self._waiting += self._next_device_only() if self._is_draining else self._next_to_go()
            self._seen = self._tree.version, self._host.version

    def _next_to_go(self) -> list[bytes]:
        """Return the next pages to evict that fit into host memory. Only touch pages that host memory already has."""
        room = [self._host.num_movable(owner) for owner in range(self._host.num_owners)]
        wanted = []
        for owner in range(self._tree.num_owners):
            for key in self._tree.oldest_idle(owner, MARGIN):
                host_owner = self._host_owner(key)
                if room[host_owner] and not self._host.is_busy(key):
                    room[host_owner] -= 1
                    wanted.append(key)
        self._host.touch(wanted[::-1])  # a prefix's deepest pages are the least recently used
        return [key for key in wanted if key not in self._host]

    def _note_device_only(self, keys: Iterable[bytes]) -> None:
        for key in self._only_on_device(keys):
            self._device_only[self._host_owner(key)].append(key)

    def _host_owner(self, key: bytes) -> int:
        return self._tree.index_of(key) % self._host.num_owners

    def _only_on_device(self, keys: Iterable[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self._host and self._tree.page_of(key) is not None]

    def _next_device_only(self) -> list[bytes]:
        """Return as many of these pages as open jobs and host memory can take without evicting an unstored page."""
        limit = max(1, MAX_OPEN * BATCH_PAGES // self._host.num_owners)
        return [
            keys.popleft()
            for owner, keys in enumerate(self._device_only)
            for _ in range(self._host.make_room(owner, min(limit, len(keys))))
        ]

    def _next_batch(self) -> list[TierPage]:
        pages: list[TierPage] = []
        while self._waiting and len(pages) < BATCH_PAGES:
            key = self._waiting.popleft()
            if key in self._host:
                continue
            device, host = self._tree.page_of(key), None
            if device is not None:
                index, depth = self._tree.index_of(key), self._tree.depth_of(key)
                host = self._host.reserve(key, index, depth)
            if host is None:
                self.num_lost += 1
            else:
                pages.append(TierPage(key=key, index=index, depth=depth, device=device, host=host))
        return pages

    def _on_saved(self, pages: list[TierPage], entries: list[object], outcome: Outcome) -> None:
        for page, entry, is_done in zip(pages, entries, outcome.done, strict=True):
            if is_done and self._tree.entry(page.key) is entry:
                self._host.fill(page.key)
                self._saved.append(page.key)
                continue
            self._host.free(page.key)
            if is_done and self._tree.page_of(page.key) is not None:
                self._waiting.append(page.key)  # evicted and computed again, while the first save was under way
            else:
                self.num_lost += 1
        self._renew_prefixes(pages)

    def _renew_prefixes(self, pages: list[TierPage]) -> None:
        """Touch the prefixes of saved pages, since a page whose prefix is evicted cannot be found."""
        renewed: set[bytes] = set()
        for page in sorted(pages, key=lambda page: page.index, reverse=True):
            if page.key not in renewed:
                path = self._tree.path(page.key)
                self._host.touch(path)
                renewed.update(path)
