"""Ranks that hold the same KV heads: prefill sends each its part of the pages; here they give each other the rest."""

from collections.abc import Iterator, Sequence

from workers.cache.page_copies import PageCopies
from workers.cache.page_pool import PagePool
from workers.parallel.collectives import Communicator

MOST_BYTES = 64 << 20
"""Of pages that are gathered at a time, beside the pool."""


class HeadCopies:
    """One rank of such a group; alone, it has everything already."""

    def __init__(self, pool: PagePool, group: Communicator) -> None:
        """``group``: all ranks with these heads, in the order of their TP ranks."""
        self._pages = pool.data
        self._at_once = max(1, MOST_BYTES // pool.page_bytes)
        self._group = group

    def spread(self, pages: Sequence[int]) -> None:
        """Make pages that prefill has written whole on every rank; all call this with the same pages.

        Page p was sent to member p modulo the size of the group, as ``transfer.plan.PageShare`` has it.
        """
        for member in range(self._group.size if self._group.size > 1 else 0):
            for part in self._parts([page for page in pages if page % self._group.size == member]):
                content, rows = self._pages.new_empty(len(part), *self._pages.shape[1:]), range(len(part))
                if member == self._group.rank:
                    PageCopies(self._pages, part, content, rows).start()
                self._group.broadcast(content, member)
                if member != self._group.rank:
                    PageCopies(content, rows, self._pages, part).start()

    def _parts(self, pages: Sequence[int]) -> Iterator[Sequence[int]]:
        return (pages[first : first + self._at_once] for first in range(0, len(pages), self._at_once))
