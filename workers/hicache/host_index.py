"""Which page of the host pools holds which tokens: ids only, no memory.

A page is reserved, then filled; only filled ones are found. They may be given up, the least recently used first, except
while somebody holds or has pinned them. Pages are divided over owners as in ``page_allocator``.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite

from workers.cache.page_journal import PageJournal
from workers.hicache.pins import Pins

NEVER_S = -inf
"""When storage was given a page that it may not have."""
ASKED_S = inf
"""The same of one that it is being given."""


@dataclass(slots=True)
class _HostPage:
    page: int
    place: int
    depth: int
    is_filled: bool = False
    num_holders: int = 0
    stored_s: float = NEVER_S
    """When storage last had it, as far as is known."""
    is_fetched: bool = False
    """It came from storage and no request has used it yet."""


class HostIndex:
    """Pages 0 .. num_pages-1 by page key, over all owners."""

    def __init__(self, pages_per_owner: int, num_owners: int) -> None:
        self.num_pages = pages_per_owner * num_owners
        self.num_owners = num_owners
        self._free = [deque(range(owner, self.num_pages, num_owners)) for owner in range(num_owners)]
        self._pages: dict[bytes, _HostPage] = {}
        self._order: list[OrderedDict[bytes, _HostPage]] = [OrderedDict() for _ in range(num_owners)]
        """By owner, least recently used first, those that are not pinned: nobody looks past thousands of others."""
        self._kept: list[set[bytes]] = [set() for _ in range(num_owners)]
        """By owner: pages that cannot be given up now."""
        self.pins = Pins(pages_per_owner, num_owners)
        self.version = 0
        """Another number whenever other pages might be given up next."""
        self.journal = PageJournal()
        """What was filled and given up."""
        self.num_evicted = [0] * num_owners
        """By owner."""

    @property
    def num_used(self) -> int:
        """Pages that are reserved or filled."""
        return len(self._pages)

    def num_used_of(self, owner: int) -> int:
        """Those of one owner."""
        return self.num_pages // self.num_owners - len(self._free[owner])

    @property
    def num_pinned(self) -> int:
        """Pages that are never given up."""
        return len(self._pages) - sum(map(len, self._order))

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def page_of(self, key: bytes) -> int | None:
        """The filled page of a key."""
        found = self._pages.get(key)
        return found.page if found is not None and found.is_filled else None

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first keys, up to the first that has none."""
        pages = []
        for key in keys:
            page = self.page_of(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def filled_keys(self) -> list[bytes]:
        """All keys of filled pages."""
        return [key for key, page in self._pages.items() if page.is_filled]

    def oldest(self, owner: int, count: int) -> list[bytes]:
        """Keys of the pages of one owner that would be given up first."""
        return [key for key, page in islice(self._order[owner].items(), count) if page.is_filled]

    def reserve(self, key: bytes, place: int, depth: int = 0) -> int | None:
        """A page to be filled for a key that has none; None if all of its owner's are needed.

        ``place`` and ``depth`` are those of ``TierPage``.
        """
        assert key not in self._pages, "a key has two host pages"
        owner = place % self.num_owners
        if not self._free[owner]:
            self._evict(owner)
        if not self._free[owner]:
            return None
        page = self._free[owner].popleft()
        self._pages[key] = _HostPage(page, place, depth)
        self._settle(key)
        self.version += 1
        return page

    def num_movable(self, owner: int) -> int:
        """Pages of an owner that are free or could be given up now."""
        return self.num_pages // self.num_owners - len(self._kept[owner])

    def is_kept(self, key: bytes) -> bool:
        """Whether a page is here, or reserved, and cannot be given up now."""
        page = self._pages.get(key)
        return page is not None and key in self._kept[page.page % self.num_owners]

    def make_room(self, owner: int, wanted: int) -> int:
        """Give up pages of an owner that storage was offered until so many are free; how many of them are."""
        lacking = wanted - len(self._free[owner])
        offered = (key for key, page in self._order[owner].items() if page.stored_s != NEVER_S and _may_go(page))
        for key in list(islice(offered, max(0, lacking))):
            self.num_evicted[owner] += 1
            self.drop(key)
        return min(wanted, len(self._free[owner]))

    def fill(self, key: bytes) -> None:
        """The reserved page has its bytes."""
        self._of(key).is_filled = True
        self._settle(key)
        self.version += 1
        self.journal.note(key, True)

    def place_of(self, key: bytes) -> int:
        """The place of a page that is here."""
        return self._of(key).place

    def depth_of(self, key: bytes) -> int:
        """How many pages are before one that is here in its prompt."""
        return self._of(key).depth

    def note_fetched(self, key: bytes, now_s: float) -> None:
        """A filled page is a copy from storage."""
        page = self._of(key)
        page.stored_s, page.is_fetched = now_s, True

    def note_stored(self, key: bytes, stored_s: float) -> None:
        """Storage had a copy of a filled page then, or is being given it, or may not have it."""
        self._of(key).stored_s = stored_s
        self.version += stored_s == NEVER_S

    def stored_s(self, key: bytes) -> float:
        """When storage last had a page that is here."""
        return self._of(key).stored_s

    def doubt_storage(self) -> list[bytes]:
        """Storage may have lost what it had: the pages that it is to be offered again."""
        doubted = [key for key, page in self._pages.items() if isfinite(page.stored_s)]
        for key in doubted:
            self.note_stored(key, NEVER_S)
        return doubted

    def note_used(self, keys: Sequence[bytes]) -> list[bool]:
        """Requests use these pages; which of them only came from storage for this."""
        pages = [self._of(key) for key in keys]
        fetched = [page.is_fetched for page in pages]
        for page in pages:
            page.is_fetched = False
        return fetched

    def drop(self, key: bytes) -> None:
        """Give up a page that nobody holds."""
        page = self._pages.pop(key)
        assert page.num_holders == 0, f"host page {page.page} is dropped but held"
        owner = page.page % self.num_owners
        self._order[owner].pop(key, None)
        self._kept[owner].discard(key)
        self._free[owner].append(page.page)
        self.version += 1
        if page.is_filled:
            self.journal.note(key, False)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Keep filled pages until they are let go as often."""
        for key in keys:
            page = self._of(key)
            assert page.is_filled, f"host page {page.page} is held before it has its bytes"
            page.num_holders += 1
            self._settle(key)

    def release(self, keys: Iterable[bytes]) -> None:
        """Let pages go."""
        for key in keys:
            page = self._of(key)
            assert page.num_holders > 0, f"host page {page.page} is released but not held"
            page.num_holders -= 1
            self._settle(key)
        self.version += 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """The pages of a prefix were used: those of them that are here come to be given up deepest first."""
        for key in reversed(keys):
            page = self._pages.get(key)
            if page is not None and key not in self.pins:
                self._order[page.page % self.num_owners].move_to_end(key)
        self.version += 1

    def pin(self, keys: Sequence[bytes], *, is_pinned: bool) -> None:
        """Never give up the pages of a prompt, also those that come later; or give them up as any other."""
        for key in self.pins.add(keys) if is_pinned else self.pins.remove(keys):
            if key in self._pages:
                self._settle(key)
        self.version += 1

    def flush(self) -> None:
        """Give up everything that is neither held nor pinned."""
        for pages in self._order:
            for key in [key for key, page in pages.items() if _may_go(page)]:
                self.drop(key)

    def check_integrity(self) -> None:
        """Prove that every page is free or has one key, and stands with its owner."""
        used = [page.page for page in self._pages.values()]
        free = [page for pages in self._free for page in pages]
        assert sorted(used + free) == list(range(self.num_pages)), "a host page is lost, or has two keys"
        ordered = {key: page for pages in self._order for key, page in pages.items()}
        assert ordered == {key: page for key, page in self._pages.items() if key not in self.pins}, "a page has no turn"
        movable = {key for key, page in ordered.items() if _may_go(page)}
        assert self._pages.keys() - movable == set().union(*self._kept), "a page is kept for nobody"
        for owner, pages in enumerate(self._order):
            assert all(page.page % self.num_owners == owner for page in pages.values()), f"owner {owner} has a stranger"

    def _evict(self, owner: int) -> None:
        """Give up the owner's least recently used page that may go, if there is one."""
        oldest = next((key for key, page in self._order[owner].items() if _may_go(page)), None)
        if oldest is not None:
            self.num_evicted[owner] += 1
            self.drop(oldest)

    def _settle(self, key: bytes) -> None:
        """Something has changed that says whether the page has a turn, and whether it may go."""
        page = self._of(key)
        owner = page.page % self.num_owners
        if key in self.pins:
            self._order[owner].pop(key, None)
        else:
            self._order[owner].setdefault(key, page)
        if key in self.pins or not _may_go(page):
            self._kept[owner].add(key)
        else:
            self._kept[owner].discard(key)

    def _of(self, key: bytes) -> _HostPage:
        return self._pages[key]


def _may_go(page: _HostPage) -> bool:
    """Of those that are not pinned."""
    return page.is_filled and page.num_holders == 0
