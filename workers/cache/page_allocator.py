"""Page allocation in a replica. Ids only, no memory.

If every CP rank holds all KV, there is one owner, and all ranks use the same ids. If pages are divided among n ranks,
page g belongs to owner g % n, which stores it as page g // n of its own pool. Page j of a request belongs to owner
(base + j) % n, so each demand names the owner of its first page. Pages of all lifetimes share the same memory.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from cluster.spec.kv import NO_PAGE, first_owner, lifetime_key, lifetime_of
from workers.cache.lifetimes import ONE_LIFETIME, Lifetimes, PageLists, live_pages
from workers.cache.prefix_tree import PageJournal, PrefixTree

Demand = tuple[int, int]
"""Number of consecutive pages, and the owner of the first one."""


def _is_nowhere(_key: bytes) -> bool:
    return False


class PageAllocator:
    """Allocator of page ids 0 to num_pages - 1.

    A page is free, held, or cached. Cached pages are read-only and are evicted on demand if nothing holds them.
    Owner arguments are taken modulo the number of owners.
    """

    def __init__(
        self,
        pages_per_owner: int,
        tree: PrefixTree | None = None,
        num_owners: int = 1,
        lifetimes: Lifetimes = ONE_LIFETIME,
    ) -> None:
        """Create an allocator. Without a tree, nothing is cached."""
        assert tree is None or tree.num_owners == num_owners, "tree and allocator divide pages differently"
        self.num_pages = pages_per_owner * num_owners
        self.lifetimes = lifetimes
        self._num_owners = num_owners
        self._free = [deque(range(owner, self.num_pages, num_owners)) for owner in range(num_owners)]
        self._held = Counter[int]()
        """Number of holders of each uncached page: more than one if several choices share a prompt."""
        self._tree = tree
        self.num_evicted = 0
        """Number of cached pages evicted to free space."""
        self.num_gains = 0
        """Number of pages released or shared so far. Until it changes, a failed allocation would fail again."""

    @property
    def num_free(self) -> int:
        """Return how many consecutive pages can be allocated. The owner with the fewest free pages sets the limit."""
        return self._num_owners * min(self._free_by_owner())

    @property
    def num_cached(self) -> int:
        return self._tree.num_pages if self._tree else 0

    @property
    def is_caching(self) -> bool:
        return self._tree is not None

    def is_cached(self, page: int) -> bool:
        return self._tree is not None and page in self._tree

    def is_held(self, page: int) -> bool:
        """Return whether exactly one sequence holds this page and can therefore write to it."""
        return self._held[page] == 1

    def find(self, keys: Sequence[bytes], is_below: Callable[[bytes], bool] = _is_nowhere) -> PageLists:
        """Return the cached pages of the longest prefix after which a request can continue.

        The pages may be evicted until ``allocate`` is called. ``is_below`` returns whether a lower tier has a page.
        Pages found only there are ``NO_PAGE`` in the result.
        """
        num_pages = self.count_cached(keys, is_below)
        if self._tree is None or not num_pages:
            return [[] for _ in self.lifetimes.each]
        whole = self._tree.find(keys[:num_pages])
        lists = [whole + [NO_PAGE] * (num_pages - len(whole))]
        firsts = self.lifetimes.first_pages(num_pages * self.lifetimes.page_size)
        for lifetime, first in list(enumerate(firsts))[1:]:
            seen = [self._tree.page_of(lifetime_key(key, lifetime)) for key in keys[first:num_pages]]
            lists.append([NO_PAGE] * first + [NO_PAGE if page is None else page for page in seen])
        return lists

    def count_cached(self, keys: Sequence[bytes], is_below: Callable[[bytes], bool] = _is_nowhere) -> int:
        tree = self._tree
        if tree is None:
            return 0
        return self.lifetimes.longest_prefix(
            keys, tree.count(keys), lambda key: tree.page_of(key) is not None or is_below(key)
        )

    def would_fit(self, demands: Iterable[Demand], held_pages: Collection[int]) -> bool:
        """Return whether all demands could be met if only the given pages were held."""
        held = Counter(page % self._num_owners for page in held_pages)
        each = self.num_pages // self._num_owners
        return self._covers([each - held[owner] for owner in range(self._num_owners)], demands)

    def can_allocate(self, demands: Iterable[Demand], shared: Iterable[int] = ()) -> bool:
        """Return whether all demands can be met while the ``shared`` pages are held.

        Shared pages are cached or belong to another sequence.
        """
        num_idle = Counter(page % self._num_owners for page in shared if self._tree and self._tree.is_idle(page))
        return self._covers([free - num_idle[owner] for owner, free in enumerate(self._free_by_owner())], demands)

    def allocate(self, demands: Sequence[Demand], shared: Sequence[int] = ()) -> PageLists:
        """Hold the shared pages and return new pages for each demand. Requires a successful ``can_allocate``."""
        assert self.can_allocate(demands, shared), f"{demands} requested, {self.num_free} of {self.num_pages} free"
        self._held.update(page for page in shared if not self.is_cached(page))
        if self._tree:
            self._tree.claim([page for page in shared if page in self._tree])
            needed = self._total_by_owner(demands)
            missing = [max(0, number - len(free)) for number, free in zip(needed, self._free, strict=True)]
            # Leaves are evicted first. Reversing the list makes neighbours in a prefix adjacent, so they are sent as
            # one span.
            evicted = self._tree.evict(missing)
            self.num_evicted += len(evicted)
            for page in reversed(evicted):
                self._put_back(page)
        lists = [
            [self._free[(first_owner + index) % self._num_owners].popleft() for index in range(count)]
            for count, first_owner in demands
        ]
        self._held.update(live_pages(lists))
        return lists

    def put_into_cache(self, pages: Sequence[Sequence[int]], keys: Sequence[bytes], num_shared: int = 0) -> int:
        """Cache the leading complete pages of a running sequence. Return how many of its pages are now cached.

        In the first lifetime, caching stops before the first page that has another copy in the cache, because a holder
        of a page must hold all its ancestors. ``num_shared`` is the previous call's result.
        """
        self.num_gains += 1
        if self._tree is None:
            return 0
        whole = pages[0]
        num_own = self._tree.num_own(keys, whole, num_shared)
        num_insertable = self._num_insertable(whole[:num_own], num_shared)
        self._forget_held(self._tree.insert(keys[:num_insertable], whole[:num_insertable], num_shared))
        self._cache_others(self._tree, pages, keys, num_shared)
        return num_insertable

    def free(self, pages: Sequence[int]) -> None:
        """Free held pages, given by lifetime in order of position. Cached pages stay cached."""
        self.num_gains += len(pages)
        own = [page for page in pages if not self.is_cached(page)]
        for page in own:
            assert self._held[page] > 0, f"page {page} is freed but not held"
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
                self._put_back(page)
        if self._tree:
            self._tree.release([page for page in pages if page in self._tree])

    def keep(self, pages: Sequence[Sequence[int]], keys: Sequence[bytes]) -> None:
        """Cache the leading pages that have keys, and free all pages. Pages with keys must be complete."""
        if self._tree is None or not keys:
            self.free(live_pages(pages))
            return
        whole = pages[0]
        self.num_gains += len(whole)
        num_insertable = self._num_insertable(whole[: len(keys)])
        path = self._tree.insert(keys[:num_insertable], whole[:num_insertable])
        self._forget_held(path)
        self._cache_others(self._tree, pages, keys)
        kept = set(path)
        self.free([page for page in live_pages(pages) if page not in kept])
        self._tree.release(path)

    def cached_keys(self) -> list[bytes]:
        """Return the keys of the first lifetime's cached pages, ancestors first."""
        keys = self._tree.keys() if self._tree else []
        return [key for key in keys if not lifetime_of(key)]

    def new_journal(self) -> PageJournal:
        """Return a journal that records every change of the cached pages from now on."""
        journal = PageJournal()
        if self._tree:
            self._tree.journals.append(journal)
        return journal

    def flush(self) -> None:
        if self._tree:
            idle = [self._tree.num_idle(owner) for owner in range(self._num_owners)]
            for page in reversed(self._tree.evict(idle)):
                self._put_back(page)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Assert that exactly these pages are held. A page with several holders is listed once per holder."""
        holders = Counter(held)
        if self._tree:
            self._tree.check_integrity({page: holders[page] for page in holders if page in self._tree})
        own = Counter({page: count for page, count in holders.items() if not self.is_cached(page)})
        assert own == self._held, f"holders claim {sorted(own.elements())}, allocator: {sorted(self._held.elements())}"
        free = [page for pages in self._free for page in pages]
        assert not any(self.is_cached(page) or page in self._held for page in free), "a free page is in use"
        for owner, pages in enumerate(self._free):
            assert all(page % self._num_owners == owner for page in pages), f"owner {owner} has a page of another owner"
        total = len(free) + len(self._held) + self.num_cached
        assert total == self.num_pages, f"free, held and cached pages are {total}, not {self.num_pages}"

    def _cache_others(
        self, tree: PrefixTree, pages: Sequence[Sequence[int]], keys: Sequence[bytes], first: int = 0
    ) -> None:
        """Cache the pages of later lifetimes, except pages that have another copy in the cache.

        They need no ancestors. A prefix that is cached without them cannot be used until it is computed again.
        """
        index = first_owner(keys[0]) if keys else 0
        for lifetime, ids in list(enumerate(pages))[1:]:
            end = min(len(keys), len(ids))
            start = next((at + 1 for at in reversed(range(first, end)) if ids[at] == NO_PAGE), first)
            for at in range(start, end):
                key, is_own = lifetime_key(keys[at], lifetime), self._held[ids[at]] == 1
                if is_own and tree.insert_alone(key, ids[at], index + at, at):
                    self._forget_held([ids[at]])

    def _num_insertable(self, pages: Sequence[int], num_shared: int = 0) -> int:
        """Return how many leading pages are cached or held only by the caller.

        Another holder of a page does not necessarily hold the page's ancestors in the tree.
        """
        numbers = range(num_shared, len(pages))
        return next((number for number in numbers if self._held[pages[number]] > 1), len(pages))

    def _forget_held(self, pages: Sequence[int]) -> None:
        """Move the holder counts of these pages to the tree."""
        for page in pages:
            self._held.pop(page, None)

    def _free_by_owner(self) -> list[int]:
        tree = self._tree
        return [len(free) + (tree.num_idle(owner) if tree else 0) for owner, free in enumerate(self._free)]

    def _by_owner(self, count: int, first_owner: int) -> list[int]:
        """Return the number of pages per owner in a run of consecutive pages."""
        each, rest = divmod(count, self._num_owners)
        return [each + ((owner - first_owner) % self._num_owners < rest) for owner in range(self._num_owners)]

    def _total_by_owner(self, demands: Iterable[Demand]) -> list[int]:
        counts = [self._by_owner(*demand) for demand in demands]
        return [sum(count[owner] for count in counts) for owner in range(self._num_owners)]

    def _covers(self, num_free: Sequence[int], demands: Iterable[Demand]) -> bool:
        needed = self._total_by_owner(demands)
        return all(number <= there for number, there in zip(needed, num_free, strict=True))

    def _put_back(self, page: int) -> None:
        self._free[page % self._num_owners].append(page)
