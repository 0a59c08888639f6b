"""Prefix tree of cached pages and their eviction order. Ids only, no memory.

A node is a full page under its chained key (``cluster.spec.kv``). A holder of a page holds all its ancestors and
releases the deepest pages first. In each owner's idle list, ordered by last use, a page therefore precedes its
ancestors, and all descendants of an idle page are idle too. Pages of lifetimes after the first have neither ancestors
nor descendants.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from cluster.spec.kv import first_owner


class PageJournal:
    """Net changes by page key. Pages that were stored and removed again are not reported."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}

    def note(self, key: bytes, is_stored: bool) -> None:
        if self._changes.pop(key, is_stored) is is_stored:
            self._changes[key] = is_stored

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys stored and the keys removed since the last call."""
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return stored, [key for key, is_stored in changes.items() if not is_stored]


@dataclass(slots=True, eq=False)
class _Node:
    key: bytes
    page: int
    parent: "_Node | None"
    index: int
    """Index that determines the page's owner if pages are divided (``cluster.spec.kv``)."""
    depth: int
    """Number of ancestors."""
    num_holders: int = 1
    children: "set[_Node]" = field(default_factory=set)


class PrefixTree:
    """Tree of the pages of computed prefixes. Idle pages have no holders and can be evicted.

    Page g belongs to owner g modulo ``num_owners``.
    """

    def __init__(self, num_owners: int = 1) -> None:
        self.num_owners = num_owners
        self._by_key: dict[bytes, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._idle: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(num_owners)]
        """Idle pages of each owner with their release numbers, oldest first."""
        self._idle_order = count()
        self.version = 0
        """Number that changes when the next pages to evict may have changed."""
        self.journals: list[PageJournal] = []

    @property
    def num_pages(self) -> int:
        return len(self._by_page)

    def num_idle(self, owner: int) -> int:
        return len(self._idle[owner])

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def is_idle(self, page: int) -> bool:
        return page in self._idle[page % self.num_owners]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix. Only claimed pages are protected from eviction."""
        pages = []
        for key in keys:
            node = self._by_key.get(key)
            if node is None:
                break
            pages.append(node.page)
        return pages

    def count(self, keys: Sequence[bytes]) -> int:
        """Return how many pages ``find`` would return, by bisection: the ancestors of a cached page are cached."""
        return bisect_left(keys, True, key=lambda key: key not in self._by_key)

    def page_of(self, key: bytes) -> int | None:
        node = self._by_key.get(key)
        return node.page if node else None

    def entry(self, key: bytes) -> object | None:
        """Return a cached page's entry. If the page is evicted and cached again, it is another object."""
        return self._by_key.get(key)

    def index_of(self, key: bytes) -> int:
        """Return the index that determines a cached page's owner."""
        return self._by_key[key].index

    def depth_of(self, key: bytes) -> int:
        return self._by_key[key].depth

    def path(self, key: bytes) -> list[bytes]:
        """Return the keys from the first page to this page. Empty if this page is not cached."""
        path: list[bytes] = []
        node = self._by_key.get(key)
        while node is not None:
            path.append(node.key)
            node = node.parent
        return path[::-1]

    def oldest_idle(self, owner: int, count: int) -> list[bytes]:
        return [self._by_page[page].key for page in islice(self._idle[owner], count)]

    def keys(self) -> list[bytes]:
        return list(self._by_key)

    def claim(self, pages: Sequence[int]) -> None:
        self.version += 1
        for page in pages:
            self._by_page[page].num_holders += 1
            self._idle[page % self.num_owners].pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Release claimed pages, given in the order of the prefix."""
        self.version += 1
        for page in reversed(pages):
            node = self._by_page[page]
            assert node.num_holders > 0, f"cached page {page} is released but not held"
            node.num_holders -= 1
            if node.num_holders == 0:
                self._idle[page % self.num_owners][page] = next(self._idle_order)

    def insert(self, keys: Sequence[bytes], pages: Sequence[int], first: int = 0) -> list[int]:
        """Insert a computed prefix. Return its cached pages from ``first`` on, which the caller now holds.

        If the tree has another page with the same tokens, claim that page instead of inserting the caller's. The pages
        before ``first`` must already be in the tree.
        """
        path: list[int] = []
        parent = self._by_key[keys[first - 1]] if first else None
        for key, page in zip(keys[first:], pages[first:], strict=True):
            node = self._by_key.get(key)
            if node is None:
                index, depth = (parent.index + 1, parent.depth + 1) if parent else (first_owner(key), 0)
                node = self._add(_Node(key, page, parent, index, depth))
            elif node.page != page:
                self.claim([node.page])
            path.append(node.page)
            parent = node
        return path

    def insert_alone(self, key: bytes, page: int, index: int, depth: int) -> bool:
        """Insert, without a parent, a page that the caller holds. Return False if the tree already has its key."""
        if key in self._by_key:
            return False
        self._add(_Node(key, page, None, index, depth))
        return True

    def num_own(self, keys: Sequence[bytes], pages: Sequence[int], first: int) -> int:
        """Return how many leading pages the tree has or could insert. The tree must have the first ``first`` pages."""
        num_pages = min(len(keys), len(pages))
        for number in range(first, num_pages):
            node = self._by_key.get(keys[number])
            if node is not None and node.page != pages[number]:
                return number
        return num_pages

    def evict(self, counts: Sequence[int]) -> list[int]:
        """Evict at least this many idle pages per owner and return them.

        Each eviction removes the owner's least recently used page and all its descendants.
        """
        pages: list[int] = []
        num_taken = [0] * self.num_owners
        for owner, num_pages in enumerate(counts):
            missing = num_pages - num_taken[owner]
            assert missing <= len(self._idle[owner]), f"owner {owner} needs {missing} more idle pages to evict"
            while num_taken[owner] < num_pages:
                oldest = self._by_page[next(iter(self._idle[owner]))]
                for node in reversed(_subtree(oldest)):
                    self._forget(node)
                    num_taken[node.page % self.num_owners] += 1
                    pages.append(node.page)
        return pages

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Assert that every page has the given number of holders, and no more holders than its parent."""
        order = {page: number for idle in self._idle for page, number in idle.items()}
        assert self._by_page.keys() == {node.page for node in self._by_key.values()}
        for page, node in self._by_page.items():
            assert node.num_holders == holders.get(page, 0), f"page {page} counts {node.num_holders} holders"
            assert (node.num_holders == 0) == self.is_idle(page), f"page {page} is idle and held, or neither"
            parent = node.parent
            if parent is not None:
                assert self._by_page.get(parent.page) is parent, f"the parent of page {page} is not in the tree"
                assert parent.num_holders >= node.num_holders, f"page {page} is held without its parent {parent.page}"
                assert parent.page not in order or order[page] < order[parent.page], (
                    f"{page} was released after its parent"
                )
        for owner, idle in enumerate(self._idle):
            assert list(idle.values()) == sorted(idle.values()), f"the idle pages of owner {owner} are out of order"
        children = Counter(node.parent.page for node in self._by_key.values() if node.parent is not None)
        assert all(len(node.children) == children[page] for page, node in self._by_page.items()), "children miscounted"

    def _add(self, node: _Node) -> _Node:
        assert node.page not in self._by_page, f"page {node.page} is cached under another key"
        self._by_key[node.key] = self._by_page[node.page] = node
        if node.parent is not None:
            node.parent.children.add(node)
        for journal in self.journals:
            journal.note(node.key, True)
        return node

    def _forget(self, node: _Node) -> None:
        assert not node.children, f"page {node.page} would be evicted before its descendants"
        self.version += 1
        del self._idle[node.page % self.num_owners][node.page]
        del self._by_page[node.page]
        del self._by_key[node.key]
        for journal in self.journals:
            journal.note(node.key, False)
        if node.parent is not None:
            node.parent.children.remove(node)


def _subtree(node: _Node) -> list[_Node]:
    nodes = [node]
    for found in nodes:
        nodes.extend(found.children)
    return nodes
