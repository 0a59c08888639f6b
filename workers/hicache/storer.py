"""Copies of host pages in storage: when they are made. Sans I/O."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.tiers import MoveKind, TierPage
from workers.cache.page_journal import PageJournal
from workers.hicache.breaker import Breaker
from workers.hicache.host_index import HostIndex
from workers.hicache.orders import Orders, Outcome

BATCH_PAGES = 16
"""Most pages of one order."""
MAX_OPEN = 2
"""Most orders under way; their pages stay in host memory meanwhile."""
MARGIN = 1024
"""Pages of each owner that are stored ahead of being given up under ``write_back``."""
PATIENCE_S = 60.0
"""An order that has waited so long for its turn is dropped: pages come faster than storage takes them."""


class Storer:
    """One replica's. A page that cannot be written is counted, and tried again when a request uses it.

    Under ``write_back`` it is tried again with the next that would be given up. While storage is left alone the last
    pages wait, as many as host memory has.
    """

    def __init__(self, policy: WritePolicy, host: HostIndex, orders: Orders, breaker: Breaker) -> None:
        self._policy = policy
        self._host = host
        self._orders = orders
        self._breaker = breaker
        self._waiting: deque[bytes] = deque(maxlen=host.num_pages)
        self._looked = -1
        """Version of host memory when all pages that would go next had been seen to."""
        self._is_draining = False
        self.journal = PageJournal()
        """What was stored; storage does not tell what it gives up."""
        self.num_lost = 0
        """Pages that were to be stored and are not."""

    def note_saved(self, key: bytes) -> None:
        """A page has come to host memory from the device."""
        if self._policy is not WritePolicy.WRITE_BACK:
            self._waiting.append(key)

    def note_used(self, keys: Sequence[bytes]) -> None:
        """A request begins with these pages; those that storage has missed, if they are here, are due again."""
        if self._policy is not WritePolicy.WRITE_BACK:
            self._waiting += [
                key for key in keys if self._host.page_of(key) is not None and not self._host.is_offered(key)
            ]

    def drain(self, *, is_draining: bool) -> None:
        """Store all that storage lacks, under every policy, since host memory may be gone soon; or go on as ever."""
        self._is_draining = is_draining
        self._looked = -1

    @property
    def num_waiting(self) -> int:
        """Pages that are due and not ordered yet."""
        return len(self._waiting)

    def advance(self, now_s: float) -> None:
        """Order the copies that are due, unless storage is left alone."""
        if self._breaker.is_open(now_s):
            return
        if not self._waiting and self._looked != self._host.version:
            self._looked = self._host.version
            self._waiting += [key for key in self._next_to_go() if not self._host.is_offered(key)]
        while self._waiting and self._orders.num_open(MoveKind.STORE) < MAX_OPEN:
            pages = self._next_batch()
            if pages:
                self._host.hold(page.key for page in pages)
                self._orders.give(MoveKind.STORE, pages, partial(self._on_stored, pages), PATIENCE_S)

    def _next_to_go(self) -> Iterator[bytes]:
        if self._is_draining:
            yield from self._host.filled_keys()
        elif self._policy is WritePolicy.WRITE_BACK:
            for owner in range(self._host.num_owners):
                yield from self._host.oldest(owner, MARGIN)

    def _next_batch(self) -> list[TierPage]:
        pages: list[TierPage] = []
        while self._waiting and len(pages) < BATCH_PAGES:
            key = self._waiting.popleft()
            host = self._host.page_of(key)
            if host is None:
                self.num_lost += 1
            elif not self._host.is_offered(key):
                self._host.note_offered(key)
                pages.append(TierPage(key=key, place=self._host.place_of(key), host=host))
        return pages

    def _on_stored(self, pages: list[TierPage], outcome: Outcome) -> None:
        self._host.release(page.key for page in pages)
        is_success = not outcome.failures["error"] and (any(outcome.done) or not outcome.failures["late"])
        self._breaker.note(outcome.now_s, is_success=is_success)
        for page, is_done in zip(pages, outcome.done, strict=True):
            if is_done:
                self.journal.note(page.key, True)
            else:
                self._host.note_offered(page.key, is_offered=False)
        self.num_lost += len(pages) - sum(outcome.done)
