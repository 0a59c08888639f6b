"""Page lists of requests by lifetime, and the pages that later tokens can see. Ids only, no memory.

Pages of lifetimes after the first are cached under separate keys and do not depend on other pages.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.spec.kv import NO_PAGE, KvGeometry, Lifetime, first_owner, lifetime_key
from cluster.spec.tiers import TierPage

PageLists = list[list[int]]
"""Page ids by lifetime, in order of position, with ``NO_PAGE`` where no later token can see the page."""


class Gap(NamedTuple):
    """Consecutive missing pages of a request."""

    lifetime: int
    first: int
    end: int


def live_pages(lists: Iterable[Iterable[int]]) -> list[int]:
    return [page for pages in lists for page in pages if page != NO_PAGE]


def tier_page(keys: Sequence[bytes], lifetime: int, at: int, device: int | None = None) -> TierPage:
    """Return the page of a lifetime at a position in a prefix."""
    return TierPage(key=lifetime_key(keys[at], lifetime), index=first_owner(keys[0]) + at, depth=at, device=device)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetimes of a model's KV groups, measured in pages."""

    page_size: int
    each: tuple[Lifetime, ...]

    @classmethod
    def of(cls, geometry: KvGeometry) -> "Lifetimes":
        return cls(geometry.page_size, geometry.lifetimes)

    @property
    def num(self) -> int:
        return len(self.each)

    def first_pages(self, num_tokens: int) -> list[int]:
        """Return, for each lifetime, the first page that a token after the first ``num_tokens`` can see."""
        return [lifetime.first_page(num_tokens, self.page_size) for lifetime in self.each]

    def visible(self, pages: Sequence[Sequence[int]], num_tokens: int) -> PageLists:
        """Return the pages, with ``NO_PAGE`` where no token after the first ``num_tokens`` can see them."""
        firsts = self.first_pages(num_tokens)
        return [[NO_PAGE] * min(first, len(ids)) + list(ids[first:]) for ids, first in zip(pages, firsts, strict=True)]

    def gaps(self, pages: Sequence[Sequence[int]], num_pages: int) -> list[Gap]:
        """Return the pages that a request with ``num_pages`` pages needs in addition to these full pages."""
        firsts = self.first_pages(len(pages[0]) * self.page_size)
        return [
            Gap(lifetime, *run)
            for lifetime, (ids, first) in enumerate(zip(pages, firsts, strict=True))
            for run in _missing_runs(ids, first, num_pages)
        ]

    def prefix_pages(self, keys: Sequence[bytes]) -> list[TierPage]:
        """Return the pages that the token after a prefix of full pages can see, ordered by lifetime."""
        return [
            tier_page(keys, lifetime, at)
            for lifetime, first in enumerate(self.first_pages(len(keys) * self.page_size))
            for at in range(first, len(keys))
        ]

    def prefix_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        firsts = self.first_pages(len(keys) * self.page_size)
        return [lifetime_key(key, lifetime) for lifetime, first in enumerate(firsts) for key in keys[first:]]

    def longest_prefix(self, keys: Sequence[bytes], num_known: int, has: Callable[[bytes], bool]) -> int:
        """Return the maximum number of leading full pages after which a sequence can continue.

        Args:
            num_known: number of leading pages that are known to exist.
            has: returns whether the page with a key exists. Not called for the known pages.
        """
        num_pages = next((at for at in range(num_known, len(keys)) if not has(keys[at])), len(keys))
        lifetime = 1
        while lifetime < self.num:
            first = self.first_pages(num_pages * self.page_size)[lifetime]
            lacking = (at for at in reversed(range(first, num_pages)) if not has(lifetime_key(keys[at], lifetime)))
            last = next(lacking, None)
            # Every prefix that ends after the missing page needs it.
            num_pages, lifetime = (num_pages, lifetime + 1) if last is None else (last, 1)
        return num_pages

    def can_continue(self, pages: Sequence[Sequence[int]]) -> bool:
        """Return whether these full pages include all pages that the next token can see."""
        firsts = self.first_pages(len(pages[0]) * self.page_size)
        return all(NO_PAGE not in ids[first:] for ids, first in zip(pages, firsts, strict=True))


def _missing_runs(ids: Sequence[int], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield runs of missing pages as (first, end); the last one may be empty."""
    start = first
    for at in range(first, len(ids)):
        if ids[at] != NO_PAGE:
            if start < at:
                yield start, at
            start = at + 1
    yield start, end


ONE_LIFETIME = Lifetimes(1, (Lifetime(None),))
"""Lifetimes of a model whose tokens see all earlier tokens. They apply to any page size."""
