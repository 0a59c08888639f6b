"""Which cached page holds which tokens, and which of them may be given up: ids only, no memory.

A node is one full page under its chained key (``cluster.spec.page_key``), so that one look-up a page walks the tree.
Holding a page means holding every page above it, and pages are let go deepest first; so the idle pages stand in an
order in which a page comes before the one above it, and the first of them is always a leaf: the least recently used.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Node:
    key: bytes
    page: int
    parent: "_Node | None"
    num_holders: int = 1
    num_children: int = 0


class PrefixTree:
    """The pages of computed prefixes. A page has 0..n holders; one without is idle and can be evicted."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return len(self._by_page)

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds."""
        return len(self._idle)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def is_idle(self, page: int) -> bool:
        """Whether nobody holds this cached page."""
        return page in self._idle

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix; they stay only as long as somebody claims them."""
        pages = []
        for key in keys:
            node = self._by_key.get(key)
            if node is None:
                break
            pages.append(node.page)
        return pages

    def count(self, keys: Sequence[bytes]) -> int:
        """How many pages ``find`` would give, in fewer looks: a page is never here without those above it."""
        return bisect_left(keys, True, key=lambda key: key not in self._by_key)

    def claim(self, pages: Sequence[int]) -> None:
        """Hold pages that ``find`` gave, from the first on."""
        for page in pages:
            self._by_page[page].num_holders += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Let a claim go; ``pages`` are in the order of the prefix."""
        for page in reversed(pages):
            node = self._by_page[page]
            assert node.num_holders > 0, f"cached page {page} is released but not held"
            node.num_holders -= 1
            if node.num_holders == 0:
                self._idle[page] = None

    def insert(self, keys: Sequence[bytes], pages: Sequence[int]) -> list[int]:
        """Take in a computed prefix; the pages that now stand for it, each of them held by the caller.

        Where another page stands for the same tokens already, that one is claimed, and the caller's stays its own.
        """
        path: list[int] = []
        parent: _Node | None = None
        for key, page in zip(keys, pages, strict=False):
            node = self._by_key.get(key)
            if node is None:
                assert page not in self._by_page, f"page {page} is cached under another key"
                node = self._by_key[key] = self._by_page[page] = _Node(key, page, parent)
                if parent is not None:
                    parent.num_children += 1
            elif node.page != page:
                self.claim([node.page])
            path.append(node.page)
            parent = node
        return path

    def num_own(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """How many leading pages stand for their tokens here, or would once inserted."""
        for number, (key, page) in enumerate(zip(keys, pages, strict=False)):
            node = self._by_key.get(key)
            if node is not None and node.page != page:
                return number
        return min(len(keys), len(pages))

    def evict(self, count: int) -> list[int]:
        """Forget the idle pages that were used least recently; they are the caller's now."""
        assert count <= self.num_idle, f"{count} pages to evict, {self.num_idle} idle"
        pages = []
        for _ in range(count):
            page, _ = self._idle.popitem(last=False)
            node = self._by_page.pop(page)
            assert not node.num_children, f"page {page} is evicted before the pages below it"
            del self._by_key[node.key]
            if node.parent is not None:
                node.parent.num_children -= 1
            pages.append(page)
        return pages

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Prove that every page has exactly the given number of holders, no more of them than the one above it."""
        turns = {page: turn for turn, page in enumerate(self._idle)}
        assert self._by_page.keys() == {node.page for node in self._by_key.values()}
        for page, node in self._by_page.items():
            assert node.num_holders == holders.get(page, 0), f"page {page}: {node.num_holders} holders are counted"
            assert (node.num_holders == 0) == (page in turns), f"page {page} is idle and held, or neither"
            parent = node.parent
            if parent is not None:
                assert self._by_page.get(parent.page) is parent, f"page {page} hangs below a page that is gone"
                assert parent.num_holders >= node.num_holders, f"page {page} is held without page {parent.page}"
                assert turns.get(page, 0) <= turns.get(parent.page, len(turns)), f"page {page} outlives {parent.page}"
        children = Counter(node.parent.page for node in self._by_key.values() if node.parent is not None)
        assert all(node.num_children == children[page] for page, node in self._by_page.items()), "children miscounted"
