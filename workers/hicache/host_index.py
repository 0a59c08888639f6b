"""Which page of the host pools holds which tokens: ids only, no memory.

A page is reserved, then filled; only filled ones are found. They may be given up, the least recently used first, except
while somebody holds or has pinned them. Pages are divided over owners as in ``page_allocator``.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from workers.cache.page_journal import PageJournal


@dataclass(slots=True)
class _HostPage:
    page: int
    place: int
    is_filled: bool = False
    num_holders: int = 0
    is_pinned: bool = False
    is_offered: bool = False
    """It came from storage, or storage was given it."""
    is_fetched: bool = False
    """It came from storage and no request has used it yet."""


class HostIndex:
    """Pages 0 .. num_pages-1 by page key, over all owners."""

    def __init__(self, pages_per_owner: int, num_owners: int) -> None:
        self.num_pages = pages_per_owner * num_owners
        self.num_owners = num_owners
        self._free = [deque(range(owner, self.num_pages, num_owners)) for owner in range(num_owners)]
        self._by_key: list[OrderedDict[bytes, _HostPage]] = [OrderedDict() for _ in range(num_owners)]
        """By owner, least recently used first."""
        self._owner: dict[bytes, int] = {}
        self.journal = PageJournal()
        """What was filled and given up."""
        self.num_evicted = 0

    @property
    def num_used(self) -> int:
        """Pages that are reserved or filled."""
        return len(self._owner)

    def __contains__(self, key: bytes) -> bool:
        return key in self._owner

    def page_of(self, key: bytes) -> int | None:
        """The filled page of a key."""
        owner = self._owner.get(key)
        if owner is None:
            return None
        found = self._by_key[owner][key]
        return found.page if found.is_filled else None

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
        return [key for pages in self._by_key for key, page in pages.items() if page.is_filled]

    def oldest(self, owner: int, count: int) -> list[bytes]:
        """Keys of the pages of one owner that would be given up first."""
        return [key for key, page in islice(self._by_key[owner].items(), count) if page.is_filled]

    def reserve(self, key: bytes, place: int) -> int | None:
        """A page to be filled for a key that has none; None if all of its owner's are needed."""
        assert key not in self._owner, "a key has two host pages"
        owner = place % self.num_owners
        if not self._free[owner]:
            self._evict(owner)
        if not self._free[owner]:
            return None
        page = self._free[owner].popleft()
        self._by_key[owner][key] = _HostPage(page, place)
        self._owner[key] = owner
        return page

    def fill(self, key: bytes) -> None:
        """The reserved page has its bytes."""
        self._of(key).is_filled = True
        self.journal.note(key, True)

    def place_of(self, key: bytes) -> int:
        """The place of a page that is here."""
        return self._of(key).place

    def note_fetched(self, key: bytes) -> None:
        """A filled page is a copy from storage."""
        self._of(key).is_offered = self._of(key).is_fetched = True

    def note_offered(self, key: bytes) -> None:
        """Storage is given a copy of a filled page; it is not offered again."""
        self._of(key).is_offered = True

    def is_offered(self, key: bytes) -> bool:
        """Whether storage had its chance to take a page that is here."""
        return self._of(key).is_offered

    def note_used(self, keys: Sequence[bytes]) -> list[bool]:
        """Requests use these pages; which of them only came from storage for this."""
        pages = [self._of(key) for key in keys]
        fetched = [page.is_fetched for page in pages]
        for page in pages:
            page.is_fetched = False
        return fetched

    def drop(self, key: bytes) -> None:
        """Give up a page that nobody holds."""
        owner = self._owner.pop(key)
        page = self._by_key[owner].pop(key)
        assert page.num_holders == 0, f"host page {page.page} is dropped but held"
        self._free[owner].append(page.page)
        if page.is_filled:
            self.journal.note(key, False)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Keep filled pages until they are let go as often."""
        for key in keys:
            page = self._of(key)
            assert page.is_filled, f"host page {page.page} is held before it has its bytes"
            page.num_holders += 1

    def release(self, keys: Iterable[bytes]) -> None:
        """Let pages go."""
        for key in keys:
            page = self._of(key)
            assert page.num_holders > 0, f"host page {page.page} is released but not held"
            page.num_holders -= 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """The first pages of a prefix were used, so that those above come to be given up after those below."""
        for key in reversed(keys):
            self._by_key[self._owner[key]].move_to_end(key)

    def pin(self, keys: Iterable[bytes], *, is_pinned: bool) -> int:
        """Never give up those that are there, or give them up as any other; how many there are."""
        found = [self._of(key) for key in keys if key in self._owner]
        for page in found:
            page.is_pinned = is_pinned
        return len(found)

    def flush(self) -> None:
        """Give up everything that is neither held nor pinned."""
        for pages in self._by_key:
            for key in [key for key, page in pages.items() if _may_go(page)]:
                self.drop(key)

    def check_integrity(self) -> None:
        """Prove that every page is free or has one key, and stands with its owner."""
        used = [page.page for pages in self._by_key for page in pages.values()]
        free = [page for pages in self._free for page in pages]
        assert sorted(used + free) == list(range(self.num_pages)), "a host page is lost, or has two keys"
        assert self._owner == {key: owner for owner, pages in enumerate(self._by_key) for key in pages}
        for owner, pages in enumerate(self._by_key):
            assert all(page.page % self.num_owners == owner for page in pages.values()), f"owner {owner} has a stranger"

    def _evict(self, owner: int) -> None:
        """Give up the owner's least recently used page that may go, if there is one."""
        oldest = next((key for key, page in self._by_key[owner].items() if _may_go(page)), None)
        if oldest is not None:
            self.num_evicted += 1
            self.drop(oldest)

    def _of(self, key: bytes) -> _HostPage:
        return self._by_key[self._owner[key]][key]


def _may_go(page: _HostPage) -> bool:
    return page.is_filled and page.num_holders == 0 and not page.is_pinned
