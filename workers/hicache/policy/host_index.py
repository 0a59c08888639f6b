"""Index of the host pages by page key. Ids only, no memory.

A page is reserved, then filled. Look-ups find only filled pages. The least recently used page is evicted first, unless
it is held or pinned. Pages are divided among owners as in ``page_allocator``.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite

from workers.cache.lifetimes import ONE_LIFETIME, Lifetimes
from workers.cache.prefix_tree import PageJournal
from workers.hicache.policy.pins import Pins

NEVER_S = -inf
"""Value of ``stored_s`` for a page that might not be in storage."""
STORING_S = inf
"""Value of ``stored_s`` for a page that is being written to storage."""


@dataclass(slots=True)
class HostPage:
    page: int
    index: int
    depth: int
    is_filled: bool = False
    num_holders: int = 0
    stored_s: float = NEVER_S
    """Latest time at which the page is known to have been in storage."""
    is_fetched: bool = False
    """True if the page came from storage and no request has used it yet."""

    @property
    def is_idle(self) -> bool:
        """Return whether the page may be evicted, provided it is not pinned."""
        return self.is_filled and self.num_holders == 0


class HostIndex:
    """Index of the host pages of all owners by page key. Page numbers start at 0."""

    def __init__(self, pages_per_owner: int, num_owners: int, lifetimes: Lifetimes = ONE_LIFETIME) -> None:
        self.num_pages = pages_per_owner * num_owners
        self.num_owners = num_owners
        self._free = [deque(range(owner, self.num_pages, num_owners)) for owner in range(num_owners)]
        self._pages: dict[bytes, HostPage] = {}
        self._by_use: list[OrderedDict[bytes, HostPage]] = [OrderedDict() for _ in range(num_owners)]
        """Unpinned pages by owner, least recently used first."""
        self._busy: list[set[bytes]] = [set() for _ in range(num_owners)]
        """Keys of the pages that cannot be evicted now, by owner."""
        self.pins = Pins(pages_per_owner, num_owners, lifetimes)
        self.version = 0
        """Number that changes whenever the next pages to evict may have changed."""
        self.journal = PageJournal()
        """Keys of pages filled and evicted since the last report."""
        self.num_evicted = [0] * num_owners

    @property
    def num_used(self) -> int:
        return len(self._pages)

    def num_used_of(self, owner: int) -> int:
        return self.num_pages // self.num_owners - len(self._free[owner])

    @property
    def num_pinned(self) -> int:
        return len(self._pages) - sum(map(len, self._by_use))

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def __getitem__(self, key: bytes) -> HostPage:
        return self._pages[key]

    def page_of(self, key: bytes) -> int | None:
        found = self._pages.get(key)
        return found.page if found is not None and found.is_filled else None

    def has(self, key: bytes) -> bool:
        return self.page_of(key) is not None

    def filled_keys(self) -> list[bytes]:
        return [key for key, page in self._pages.items() if page.is_filled]

    def oldest(self, owner: int, count: int) -> list[bytes]:
        """Return the keys of the owner's next pages to evict."""
        return [key for key, page in islice(self._by_use[owner].items(), count) if page.is_filled]

    def num_movable(self, owner: int) -> int:
        """Return the number of an owner's pages that are free or can be evicted now."""
        return self.num_pages // self.num_owners - len(self._busy[owner])

    def is_busy(self, key: bytes) -> bool:
        """Return whether a page is in the index and cannot be evicted now."""
        page = self._pages.get(key)
        return page is not None and key in self._busy[page.page % self.num_owners]

    def reserve(self, key: bytes, index: int, depth: int = 0) -> int | None:
        """Reserve a page for a new key. Return None if its owner has no page that is free or can be evicted.

        ``index`` and ``depth`` are as in ``TierPage``.
        """
        assert key not in self._pages, "a key has two host pages"
        owner = index % self.num_owners
        if not self._free[owner]:
            oldest = next((key for key, page in self._by_use[owner].items() if page.is_idle), None)
            if oldest is None:
                return None
            self._evict(oldest, owner)
        page = self._free[owner].popleft()
        self._pages[key] = HostPage(page, index, depth)
        self._settle(key)
        self.version += 1
        return page

    def make_room(self, owner: int, wanted: int) -> int:
        """Evict an owner's unused pages that have a copy in storage, until ``wanted`` pages are free.

        Return the number of free pages, at most ``wanted``.
        """
        lacking = wanted - len(self._free[owner])
        offered = (key for key, page in self._by_use[owner].items() if page.stored_s != NEVER_S and page.is_idle)
        for key in list(islice(offered, max(0, lacking))):
            self._evict(key, owner)
        return min(wanted, len(self._free[owner]))

    def fill(self, key: bytes) -> None:
        self._pages[key].is_filled = True
        self._settle(key)
        self.version += 1
        self.journal.note(key, True)

    def note_fetched(self, key: bytes, now_s: float) -> None:
        page = self._pages[key]
        page.stored_s, page.is_fetched = now_s, True

    def note_stored(self, key: bytes, stored_s: float) -> None:
        self._pages[key].stored_s = stored_s
        self.version += stored_s == NEVER_S

    def doubt_storage(self) -> list[bytes]:
        """Mark all pages as possibly missing from storage. Return the keys of the pages that were in storage."""
        doubted = [key for key, page in self._pages.items() if isfinite(page.stored_s)]
        for key in doubted:
            self.note_stored(key, NEVER_S)
        return doubted

    def note_used(self, keys: Sequence[bytes]) -> list[bool]:
        """Record that a request uses these pages. Return for each page whether it was fetched since its last use."""
        pages = [self._pages[key] for key in keys]
        fetched = [page.is_fetched for page in pages]
        for page in pages:
            page.is_fetched = False
        return fetched

    def free(self, key: bytes) -> None:
        page = self._pages.pop(key)
        assert page.num_holders == 0, f"host page {page.page} is freed while it is held"
        owner = page.page % self.num_owners
        self._by_use[owner].pop(key, None)
        self._busy[owner].discard(key)
        self._free[owner].append(page.page)
        self.version += 1
        if page.is_filled:
            self.journal.note(key, False)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Hold filled pages. Each call to ``hold`` needs a matching ``release``."""
        for key in keys:
            page = self._pages[key]
            assert page.is_filled, f"host page {page.page} is held before it is filled"
            page.num_holders += 1
            self._settle(key)

    def release(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            page = self._pages[key]
            assert page.num_holders > 0, f"host page {page.page} is released but not held"
            page.num_holders -= 1
            self._settle(key)
        self.version += 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a prefix's pages as used. The deepest pages are evicted first."""
        for key in reversed(keys):
            page = self._pages.get(key)
            if page is not None and key not in self.pins:
                self._by_use[page.page % self.num_owners].move_to_end(key)
        self.version += 1

    def pin(self, keys: Sequence[bytes], *, is_pinned: bool) -> None:
        """Pin or unpin a prompt's current and future pages. Pinned pages are never evicted."""
        for key in self.pins.add(keys) if is_pinned else self.pins.remove(keys):
            if key in self._pages:
                self._settle(key)
        self.version += 1

    def flush(self) -> None:
        for pages in self._by_use:
            for key in [key for key, page in pages.items() if page.is_idle]:
                self.free(key)

    def check_integrity(self) -> None:
        """Assert that every page is free or has exactly one key, and is listed under its owner."""
        used = [page.page for page in self._pages.values()]
        free = [page for pages in self._free for page in pages]
        assert sorted(used + free) == list(range(self.num_pages)), "a host page is lost or has two keys"
        listed = {key: page for pages in self._by_use for key, page in pages.items()}
        assert listed == {key: page for key, page in self._pages.items() if key not in self.pins}, (
            "a page is not listed"
        )
        movable = {key for key, page in listed.items() if page.is_idle}
        assert self._pages.keys() - movable == set().union(*self._busy), "an idle page is busy"
        for owner, pages in enumerate(self._by_use):
            assert all(page.page % self.num_owners == owner for page in pages.values()), (
                f"owner {owner} has a stray page"
            )

    def _evict(self, key: bytes, owner: int) -> None:
        self.num_evicted[owner] += 1
        self.free(key)

    def _settle(self, key: bytes) -> None:
        """Move a page to the right lists after its state has changed."""
        page = self._pages[key]
        owner = page.page % self.num_owners
        if key in self.pins:
            self._by_use[owner].pop(key, None)
        else:
            self._by_use[owner].setdefault(key, page)
        if key in self.pins or not page.is_idle:
            self._busy[owner].add(key)
        else:
            self._busy[owner].discard(key)
