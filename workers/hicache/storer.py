"""Copies of host pages in storage: when they are made. Sans I/O."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.tiers import MoveKind, TierPage
from workers.cache.page_journal import PageJournal
from workers.hicache.breaker import Breaker
from workers.hicache.host_index import ASKED_S, NEVER_S, HostIndex
from workers.hicache.orders import Orders, Outcome

BATCH_PAGES = 16
"""Most pages of one order."""
MAX_OPEN = 2
"""Most orders under way; their pages stay in host memory meanwhile."""
MARGIN = 1024
"""Pages of each owner that are stored ahead of being given up under ``write_back``."""
PATIENCE_S = 60.0
"""An order that has waited so long for its turn is dropped: pages come faster than storage takes them."""
RENEW_S = 60.0
"""A page that storage had so long ago is offered again when it is used: storage does not tell what it loses."""
MOST_TOLD = 1 << 18
"""Keys of stored pages that new routers are told."""


class Storer:
    """One replica's. A page that cannot be written is counted, and tried again when a request uses it.

    Under ``write_back`` it is tried again with the next that would be given up. While storage is left alone the last
    pages wait, as many as host memory has. To offer what storage has costs a look: ranks write what is not there.
    """

    def __init__(self, policy: WritePolicy, host: HostIndex, orders: Orders, breaker: Breaker) -> None:
        self._policy = policy
        self._host = host
        self._orders = orders
        self._breaker = breaker
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._looked = -1
        """Version of host memory when all pages that would go next had been seen to."""
        self._is_draining = False
        self._doubted: set[bytes] = set()
        """Pages that storage has had, and is offered again after those that it never had."""
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self.journal = PageJournal()
        """What was stored; storage does not tell what it gives up."""
        self.num_lost = 0
        """Pages that were to be stored and are not."""

    def note_saved(self, key: bytes) -> None:
        """A page has come to host memory from the device."""
        if self._policy is not WritePolicy.WRITE_BACK:
            self._wait([key])

    def note_used(self, keys: Sequence[bytes], now_s: float) -> None:
        """A request begins with these pages; those that storage may lack, if they are here, are due again."""
        here = [key for key in keys if self._host.page_of(key) is not None]
        for key in here:
            if NEVER_S < self._host.stored_s(key) <= now_s - RENEW_S:
                self._host.note_stored(key, NEVER_S)
        if self._policy is not WritePolicy.WRITE_BACK:
            self._wait(key for key in here if self._host.stored_s(key) == NEVER_S)

    def doubt(self) -> None:
        """Storage may have lost anything by now: offer all again that is due by the policy, or by the drain."""
        self._doubted = set(self._host.doubt_storage())

    def drain(self, *, is_draining: bool) -> None:
        """Store all that storage lacks, under every policy, since host memory may be gone soon; or go on as ever."""
        if is_draining and not self._is_draining:
            self.doubt()
        self._is_draining = is_draining
        self._looked = -1

    @property
    def num_waiting(self) -> int:
        """Pages that are due and not ordered yet."""
        return len(self._waiting)

    @property
    def stored_keys(self) -> list[bytes]:
        """Pages that were stored, the last ones."""
        return list(self._stored)

    def advance(self, now_s: float) -> None:
        """Order the copies that are due, unless storage is left alone."""
        if self._breaker.is_open(now_s):
            return
        if not self._waiting and self._looked != self._host.version:
            self._looked = self._host.version
            self._wait(key for key in self._next_to_go() if self._host.stored_s(key) == NEVER_S)
        while self._waiting and self._orders.num_open(MoveKind.STORE) < MAX_OPEN:
            pages = self._next_batch()
            if pages:
                self._host.hold(page.key for page in pages)
                self._orders.give(MoveKind.STORE, pages, partial(self._on_stored, pages), PATIENCE_S)

    def _wait(self, keys: Iterable[bytes]) -> None:
        """No more than host memory has pages: those that have waited longest go without."""
        for key in keys:
            self._waiting[key] = None
            if len(self._waiting) > self._host.num_pages:
                oldest, _ = self._waiting.popitem(last=False)
                self.num_lost += self._host.page_of(oldest) is None or self._host.stored_s(oldest) == NEVER_S

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
            host = self._host.page_of(key)
            if host is None:
                self.num_lost += 1
            elif self._host.stored_s(key) == NEVER_S:
                self._host.note_stored(key, ASKED_S)
                place, depth = self._host.place_of(key), self._host.depth_of(key)
                pages.append(TierPage(key=key, place=place, depth=depth, host=host))
        return pages

    def _on_stored(self, pages: list[TierPage], outcome: Outcome) -> None:
        self._host.release(page.key for page in pages)
        is_success = not outcome.failures["error"] and (any(outcome.done) or not outcome.failures["late"])
        self._breaker.note(outcome.now_s, is_success=is_success)
        for page, is_done in zip(pages, outcome.done, strict=True):
            self._host.note_stored(page.key, outcome.now_s if is_done else NEVER_S)
            if is_done:
                self._note_stored(page.key)
        self.num_lost += len(pages) - sum(outcome.done)

    def _note_stored(self, key: bytes) -> None:
        """Routers are told once."""
        if key in self._stored:
            return
        self.journal.note(key, True)
        self._stored[key] = None
        if len(self._stored) > MOST_TOLD:
            self._stored.popitem(last=False)
