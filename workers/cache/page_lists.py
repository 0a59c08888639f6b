"""Pages of one request by lifetime: which of them later tokens can see. Pure arithmetic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.spec.kv import NO_PAGE, KvGeometry, Lifetime

PageLists = list[list[int]]
"""Page ids by lifetime, each in order of position, with ``NO_PAGE`` where no later token sees the page."""


def live_pages(lists: Iterable[Iterable[int]]) -> list[int]:
    """Return the pages of all lifetimes."""
    return [page for pages in lists for page in pages if page != NO_PAGE]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetimes of a model's KV groups, counted in pages."""

    page_size: int
    each: tuple[Lifetime, ...]

    @classmethod
    def of(cls, geometry: KvGeometry) -> "Lifetimes":
        """Return the lifetimes of a model."""
        return cls(geometry.page_size, geometry.lifetimes)

    @property
    def num(self) -> int:
        return len(self.each)

    def first_pages(self, num_tokens: int) -> list[int]:
        """Return the first page by lifetime that a token after the first ``num_tokens`` can see."""
        return [lifetime.first_page(num_tokens, self.page_size) for lifetime in self.each]

    def visible(self, pages: Sequence[Sequence[int]], num_tokens: int) -> PageLists:
        """Return the pages without those that no token after the first ``num_tokens`` can see."""
        firsts = self.first_pages(num_tokens)
        return [[NO_PAGE] * min(first, len(ids)) + list(ids[first:]) for ids, first in zip(pages, firsts, strict=True)]

    def can_continue(self, pages: Sequence[Sequence[int]]) -> bool:
        """Return whether these full pages include all that the token after them can see."""
        firsts = self.first_pages(len(pages[0]) * self.page_size)
        return all(NO_PAGE not in ids[first:] for ids, first in zip(pages, firsts, strict=True))


ONE_LIFETIME = Lifetimes(1, (Lifetime(None),))
"""Lifetimes of a model whose tokens see all tokens before them; the page size does not matter."""
