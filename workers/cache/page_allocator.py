"""Who holds which page of a replica: ids only, no memory. Every CP rank of the replica uses the same ids."""

from collections import Counter, deque
from collections.abc import Sequence

from workers.cache.prefix_tree import PrefixTree


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1. A page is free, held by one sequence, or cached and held by 0..n of them.

    A cached page is only read. One that nobody holds is given away as if it were free.
    """

    def __init__(self, num_pages: int, tree: PrefixTree | None = None) -> None:
        """Without a tree nothing is cached."""
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._held: set[int] = set()
        self._tree = tree

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, cached or not."""
        return len(self._free) + (self._tree.num_idle if self._tree else 0)

    @property
    def num_cached(self) -> int:
        """Pages that are kept for their tokens."""
        return self._tree.num_pages if self._tree else 0

    @property
    def is_caching(self) -> bool:
        """Whether pages are kept for their tokens at all; without, nobody needs keys."""
        return self._tree is not None

    def is_cached(self, page: int) -> bool:
        """Whether this page is kept for its tokens, and must not be written to."""
        return self._tree is not None and page in self._tree

    def is_held(self, page: int) -> bool:
        """Whether one sequence alone has this page, so that it may be written to."""
        return page in self._held

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The cached pages of the longest known prefix, to be given to ``allocate`` before anything else happens."""
        return self._tree.find(keys) if self._tree else []

    def count_cached(self, keys: Sequence[bytes]) -> int:
        """How many pages ``find`` would give."""
        return self._tree.count(keys) if self._tree else 0

    def can_allocate(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether so many pages can be had when the ``shared`` ones, which ``find`` gave, are the first of them."""
        num_idle = sum(self._tree.is_idle(page) for page in shared) if self._tree else 0
        return count - len(shared) <= self.num_free - num_idle

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int]:
        """That many pages, the shared ones first; the caller has asked ``can_allocate``. Evicts what it must."""
        assert self.can_allocate(count, shared), f"{count} pages wanted, {self.num_free} of {self.num_pages} free"
        num_new = count - len(shared)
        if self._tree:
            self._tree.claim(shared)
            # Leaves go first; turned round, neighbours of a prefix stand in their order again and are sent as one span.
            self._free.extend(reversed(self._tree.evict(max(0, num_new - len(self._free)))))
        pages = [self._free.popleft() for _ in range(num_new)]
        self._held.update(pages)
        return [*shared, *pages]

    def share(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Cache the first of a sequence's pages, for which there are keys, while it goes on; their KV must be whole.

        Ends before the first page of which the cache has another copy: a holder of a page holds those above it.
        """
        if self._tree is not None:
            num_own = self._tree.num_own(keys, pages)
            self._held.difference_update(self._tree.insert(keys[:num_own], pages[:num_own]))

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back, in the order of their sequence; each must be held. Cached ones stay cached."""
        own = [page for page in pages if not self.is_cached(page)]
        for page in own:
            assert page in self._held, f"page {page} freed but not held"
            self._held.remove(page)
            self._free.append(page)
        if self._tree:
            self._tree.release([page for page in pages if page in self._tree])

    def keep(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Take pages back and cache the first of them, for which there are keys; their KV must be whole."""
        if self._tree is None:
            self.free(pages)
            return
        path = self._tree.insert(keys, pages)
        self._held.difference_update(path)
        kept = set(path)
        self.free([page for page in pages if page not in kept])
        self._tree.release(path)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Prove that the given pages are exactly those handed out, each once, or a cached one once for each holder."""
        holders = Counter(held)
        if self._tree:
            self._tree.check_integrity({page: holders[page] for page in holders if page in self._tree})
        own = Counter({page: count for page, count in holders.items() if not self.is_cached(page)})
        assert all(count == 1 for count in own.values()), f"a page has two holders: {sorted(held)}"
        assert own.keys() == self._held, f"holders claim {sorted(own)}, allocator says {sorted(self._held)}"
        assert not any(self.is_cached(page) or page in self._held for page in self._free), "a free page is in use"
        total = len(self._free) + len(self._held) + self.num_cached
        assert total == self.num_pages, f"free, held and cached pages are {total}, not {self.num_pages}"
