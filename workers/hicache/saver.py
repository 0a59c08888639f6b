"""Copies of device pages in host memory: when they are made. Sans I/O.

A copy holds nothing on the device and delays no eviction: where the page was given up before every rank had answered,
the copy is thrown away.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.tiers import MoveKind, TierPage
from workers.cache.page_journal import PageJournal
from workers.cache.prefix_tree import PrefixTree
from workers.hicache.host_index import HostIndex
from workers.hicache.orders import Orders, Outcome

BATCH_PAGES = 64
"""Most pages of one order."""
MAX_OPEN = 4
"""Most orders under way; the rest waits as keys, which hold nothing."""
MARGIN = 1024
"""Pages of each owner that are saved ahead of their eviction under ``write_back``."""


class Saver:
    """One replica's. ``advance`` is called after everything that may have changed the device cache."""

    def __init__(
        self, policy: WritePolicy, selective_hits: int, tree: PrefixTree, host: HostIndex, orders: Orders
    ) -> None:
        self._policy = policy
        self._selective_hits = selective_hits
        self._tree = tree
        self._host = host
        self._orders = orders
        self._journal = PageJournal()
        tree.journals.append(self._journal)
        self._waiting: deque[bytes] = deque()
        self._looked = -1, -1
        """Versions of both caches when all pages that would go next had been seen to."""
        self._hits: Counter[bytes] = Counter()
        self.num_lost = 0
        """Pages that were to be saved and were given up before."""
        self._saved: list[bytes] = []
        self._received: set[bytes] = set()
        self._is_draining = False
        self._left: list[deque[bytes]] = [deque() for _ in range(host.num_owners)]
        """By owner: what only the device has, while the replica drains under ``write_back``."""

    def note_hits(self, keys: list[bytes]) -> None:
        """Device pages were found by a request."""
        self.note_pinned(keys)
        if self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            for key in keys:
                self._hits[key] += 1
                if self._hits[key] == self._selective_hits:
                    self._waiting.append(key)

    def note_pinned(self, keys: Sequence[bytes]) -> None:
        """Those of these pages that are pinned are to be in host memory, if they are on the device."""
        if self._host.pins:
            self._waiting += [key for key in self._only_on_device(keys) if key in self._host.pins]

    def note_received(self, keys: list[bytes]) -> None:
        """Pages that are now cached came from a replica that keeps them itself."""
        self._received.update(keys)

    def drain(self, *, is_draining: bool) -> None:
        """Save all that only the device has, on its way to storage, though nothing pushes it out; or go on as ever.

        Under the other policies what was to be kept has been saved.
        """
        if is_draining == self._is_draining or self._policy is not WritePolicy.WRITE_BACK:
            return
        self._is_draining = is_draining
        self._looked = -1, -1
        for left in self._left:
            left.clear()
        if is_draining:
            self._leave(self._tree.keys())

    @property
    def num_waiting(self) -> int:
        """Pages that are due and not ordered yet."""
        return len(self._waiting)

    @property
    def num_left(self) -> int:
        """Pages that wait for room in host memory, which storage makes."""
        return sum(map(len, self._left))

    def advance(self) -> None:
        """Order the copies that are due, as far as there is room for them."""
        stored, removed = self._journal.take()
        received, self._received = self._received, set()
        for key in removed:
            self._hits.pop(key, None)
        if self._is_draining:
            self._leave(stored)
        self.note_pinned(stored)
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._waiting += [key for key in stored if key not in received]
        elif self._policy is WritePolicy.WRITE_BACK and self._orders.num_open(MoveKind.SAVE) == 0:
            self._look_ahead()
        while self._waiting and self._orders.num_open(MoveKind.SAVE) < MAX_OPEN:
            pages = self._next_batch()
            if pages:
                stays = [self._tree.stay(page.key) for page in pages]
                self._orders.give(MoveKind.SAVE, pages, partial(self._on_saved, pages, stays))

    def take_saved(self) -> list[bytes]:
        """Keys of the copies made since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def _look_ahead(self) -> None:
        """Most calls come when nothing has changed, and thousands of pages would be looked through in vain."""
        if self._looked != (self._tree.version, self._host.version):
            self._waiting += self._next_left() if self._is_draining else self._next_to_go()
            self._looked = self._tree.version, self._host.version

    def _next_to_go(self) -> list[bytes]:
        """Not more than host memory has places for, and those it has are renewed: copies would push each other out."""
        room = [self._host.num_movable(owner) for owner in range(self._host.num_owners)]
        wanted = []
        for owner in range(self._tree.num_owners):
            for key in self._tree.oldest_idle(owner, MARGIN):
                host_owner = self._tree.place_of(key) % self._host.num_owners
                if room[host_owner] and not self._host.is_kept(key):
                    room[host_owner] -= 1
                    wanted.append(key)
        self._host.touch(wanted[::-1])  # the deepest of a prefix are idle the longest
        return [key for key in wanted if key not in self._host]

    def _leave(self, keys: Iterable[bytes]) -> None:
        for key in self._only_on_device(keys):
            self._left[self._tree.place_of(key) % self._host.num_owners].append(key)

    def _only_on_device(self, keys: Iterable[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self._host and self._tree.page_of(key) is not None]

    def _next_left(self) -> list[bytes]:
        """As many as can be ordered at once, and as host memory has room for beside what storage has yet to take."""
        most = max(1, MAX_OPEN * BATCH_PAGES // self._host.num_owners)
        return [
            left.popleft()
            for owner, left in enumerate(self._left)
            for _ in range(self._host.make_room(owner, min(most, len(left))))
        ]

    def _next_batch(self) -> list[TierPage]:
        pages: list[TierPage] = []
        while self._waiting and len(pages) < BATCH_PAGES:
            key = self._waiting.popleft()
            device = self._tree.page_of(key)
            if key in self._host:
                continue
            if device is None:
                self.num_lost += 1
                continue
            place, depth = self._tree.place_of(key), self._tree.depth_of(key)
            host = self._host.reserve(key, place, depth)
            if host is None:
                self.num_lost += 1
                continue
            pages.append(TierPage(key=key, place=place, depth=depth, device=device, host=host))
        return pages

    def _on_saved(self, pages: list[TierPage], stays: list[object], outcome: Outcome) -> None:
        for page, stay, is_done in zip(pages, stays, outcome.done, strict=True):
            if is_done and self._tree.stay(page.key) is stay:
                self._host.fill(page.key)
                self._saved.append(page.key)
            else:
                self._host.drop(page.key)
                self.num_lost += 1
        self._renew_prefixes(pages)

    def _renew_prefixes(self, pages: list[TierPage]) -> None:
        """Without the pages above, those that were saved are never found: these must not be given up before."""
        renewed: set[bytes] = set()
        for page in sorted(pages, key=lambda page: page.place, reverse=True):
            if page.key not in renewed:
                path = self._tree.path(page.key)
                self._host.touch(path)
                renewed.update(path)
