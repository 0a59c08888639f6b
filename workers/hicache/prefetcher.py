"""Pages read from storage into host memory for requests that will need them. Sans I/O.

What is there is asked first, so that nothing in host memory makes room for pages that do not come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from cluster.spec.hicache_config import PrefetchPolicy, StorageConfig
from cluster.spec.ids import Room
from cluster.spec.page_key import first_place
from cluster.spec.tiers import MoveKind, TierPage
from workers.hicache.breaker import Breaker
from workers.hicache.host_index import HostIndex
from workers.hicache.orders import Orders, Outcome

BATCH_PAGES = 32
"""Most pages of one order."""
MAX_OPEN = 2
"""Most orders of one request under way."""
PATIENCE_S = 30.0
"""How long storage is read for one request, where the policy is not `timeout`, whose own settings say so."""


@dataclass(slots=True, eq=False)
class _Wish:
    """What one request would have from storage."""

    keys: Sequence[bytes]
    """All pages that the request begins with."""
    pages: list[TierPage]
    """Those that host memory did not have, in their order."""
    deadline_s: float
    """The request waits no longer than this."""
    late_s: float
    """Storage that answers after this is too slow; nothing more is read."""
    num_wanted: int = 0
    """Leading pages that are there, as far as is known."""
    num_ordered: int = 0
    num_open: int = 1
    """Orders under way; the first one asks what is there."""
    shared: list[bytes] = field(default_factory=list)
    """Pages that were on their way for another request."""
    held: list[bytes] = field(default_factory=list)
    """Host pages kept for this request."""
    is_forgotten: bool = False


class Prefetcher:
    """One replica's."""

    def __init__(
        self, config: StorageConfig, page_size: int, host: HostIndex, orders: Orders, breaker: Breaker
    ) -> None:
        self._config = config
        self._page_size = page_size
        self._host = host
        self._orders = orders
        self._breaker = breaker
        self._wishes: dict[Room, _Wish] = {}
        self.num_late = 0
        """Requests that went on without pages that storage had not given in time."""

    def expect(self, room: Room, keys: Sequence[bytes], num_here: int, now_s: float) -> None:
        """A request will begin with these pages, and the tiers above have so many of them."""
        lacking = keys[num_here:]
        tokens = len(lacking) * self._page_size
        if tokens < self._config.prefetch_min_tokens or self._breaker.is_open(now_s):
            return
        most = self._host.num_pages // 2
        place = first_place(keys[0]) + num_here
        pages = [
            TierPage(key=key, place=place + number, depth=num_here + number)
            for number, key in enumerate(lacking[:most])
        ]
        patience_s = self._patience_s(tokens)
        wish = self._wishes[room] = _Wish(keys, pages, now_s + patience_s, now_s + (patience_s or PATIENCE_S))
        self._orders.give(MoveKind.LOOK_UP, pages, partial(self._on_looked_up, wish), wish.late_s - now_s)

    def is_waiting(self, room: Room, now_s: float) -> bool:
        """Whether the request is to wait for more of its pages."""
        wish = self._wishes.get(room)
        return wish is not None and now_s < wish.deadline_s and self._is_open(wish)

    def next_deadline_s(self) -> float | None:
        """When a request will wait no longer, if any waits."""
        return min((wish.deadline_s for wish in self._wishes.values() if self._is_open(wish)), default=None)

    def forget(self, room: Room, now_s: float) -> None:
        """The request starts, or is over; what is on its way still comes."""
        wish = self._wishes.pop(room, None)
        if wish is None:
            return
        wish.is_forgotten = True
        self._host.release(wish.held)
        self._host.touch(wish.keys)
        if wish.num_open and now_s >= wish.late_s:
            self.num_late += 1
            self._breaker.note(now_s, is_success=False)

    def _is_open(self, wish: _Wish) -> bool:
        wish.shared = [key for key in wish.shared if key in self._host and self._host.page_of(key) is None]
        return wish.num_open > 0 or bool(wish.shared)

    def _patience_s(self, tokens: int) -> float:
        match self._config.prefetch:
            case PrefetchPolicy.BEST_EFFORT:
                return 0.0
            case PrefetchPolicy.WAIT_COMPLETE:
                return PATIENCE_S
            case PrefetchPolicy.TIMEOUT:
                return self._config.prefetch_base_s + self._config.prefetch_s_per_1k_tokens * tokens / 1000

    def _on_looked_up(self, wish: _Wish, outcome: Outcome) -> None:
        wish.num_open -= 1
        self._note(wish, outcome)
        if outcome.num_leading * self._page_size >= self._config.prefetch_min_tokens:
            wish.num_wanted = outcome.num_leading
            self._fetch_more(wish, outcome.now_s)

    def _fetch_more(self, wish: _Wish, now_s: float) -> None:
        while (
            wish.num_open < MAX_OPEN
            and wish.num_ordered < wish.num_wanted
            and now_s < wish.late_s
            and not wish.is_forgotten
        ):
            pages = self._next_batch(wish)
            if pages:
                wish.num_open += 1
                on_end = partial(self._on_fetched, wish, pages)
                self._orders.give(MoveKind.FETCH, pages, on_end, wish.late_s - now_s)

    def _next_batch(self, wish: _Wish) -> list[TierPage]:
        """Reserve host pages for the next pages; pages that are there, or on their way for another, are passed over."""
        batch: list[TierPage] = []
        while wish.num_ordered < wish.num_wanted and len(batch) < BATCH_PAGES:
            page = wish.pages[wish.num_ordered]
            if page.key not in self._host:
                host = self._host.reserve(page.key, page.place, page.depth)
                if host is None:
                    wish.num_wanted = wish.num_ordered
                    break
                batch.append(msgspec.structs.replace(page, host=host))
            elif self._host.page_of(page.key) is None:
                wish.shared.append(page.key)
            wish.num_ordered += 1
        return batch

    def _on_fetched(self, wish: _Wish, pages: list[TierPage], outcome: Outcome) -> None:
        wish.num_open -= 1
        self._note(wish, outcome)
        for page, is_done in zip(pages, outcome.done, strict=True):
            if is_done:
                self._keep(wish, page.key, outcome.now_s)
            else:
                self._host.drop(page.key)
        self._host.touch(wish.keys)
        if not all(outcome.done):
            wish.num_wanted = wish.num_ordered
        self._fetch_more(wish, outcome.now_s)

    def _keep(self, wish: _Wish, key: bytes, now_s: float) -> None:
        self._host.fill(key)
        self._host.note_fetched(key, now_s)
        if not wish.is_forgotten:
            self._host.hold([key])
            wish.held.append(key)

    def _note(self, wish: _Wish, outcome: Outcome) -> None:
        """An answer that is too late says nothing more: that it did not come has been noted."""
        if outcome.now_s < wish.late_s:
            self._breaker.note(outcome.now_s, is_success=not outcome.failures["error"])
