"""Defects of pages that later tokens see for a while only."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cluster.spec.kv import NO_PAGE
from cluster.spec.tiers import TierPage
from workers.cache.page_allocator import Demand, PageAllocator
from workers.cache.page_lists import Lifetimes
from workers.hicache.tiers import HostLoader
from workers.scheduler.decode_queue import DecodeQueue
from workers.scheduler.holders import PageHolders
from workers.scheduler.sequence import TokenSequence

Patch = pytest.MonkeyPatch


def free_pages_that_are_still_seen(patch: Patch) -> None:
    """A sequence frees what only the tokens of the next page do not see."""
    first_pages, free_passed = Lifetimes.first_pages, PageHolders.free_passed

    def one_page_further(self: Lifetimes, num_tokens: int) -> list[int]:
        return first_pages(self, num_tokens + self.page_size)

    def free_early(self: PageHolders, sequence: TokenSequence) -> None:
        with pytest.MonkeyPatch.context() as early:
            early.setattr(Lifetimes, "first_pages", one_page_further)
            free_passed(self, sequence)

    patch.setattr(PageHolders, "free_passed", free_early)


def continue_without_the_window(patch: Patch) -> None:
    """A cached prefix is continued though pages that the next token sees are gone from the cache."""

    def chain_alone(_self: Lifetimes, keys: Sequence[bytes], num_known: int, has: Callable[[bytes], bool]) -> int:
        return next((at for at in range(num_known, len(keys)) if not has(keys[at])), len(keys))

    patch.setattr(Lifetimes, "longest_prefix", chain_alone)
    find = PageAllocator.find

    def find_any(self: PageAllocator, keys: Sequence[bytes], *given: Any) -> list[list[int]]:
        whole, *others = find(self, keys, *given)
        return [whole, *([*filter(NO_PAGE.__ne__, pages), *whole][: len(whole)] for pages in others)]

    patch.setattr(PageAllocator, "find", find_any)


def leave_the_window_below(patch: Patch) -> None:
    """A sequence starts behind pages of host memory of which those that its window sees are not loaded."""
    load = HostLoader.load

    def load_chain(
        self: HostLoader, prefix: Sequence[bytes], pages: Sequence[TierPage], *given: Any, **settings: Any
    ) -> int:
        return load(self, prefix, [page for page in pages if page.lifetime == 0], *given, **settings)

    patch.setattr(HostLoader, "load", load_chain)


def take_all_pages_for_the_first_lifetimes(patch: Patch) -> None:
    """Copies between tiers take the layers that see everything, whichever page they are of."""
    patch.setattr(TierPage, "lifetime", 0)


def reserve_too_little_of_a_window(patch: Patch) -> None:
    """Decode reserves a page less than the first token that it computes can see, and prefill takes such a ticket."""
    first_pages = Lifetimes.first_pages

    def short(self: Lifetimes, num_tokens: int) -> list[int]:
        whole, *others = first_pages(self, num_tokens)
        most = max(0, -(-num_tokens // self.page_size) - 1)
        return [whole, *(min(first + 1, most) for first in others)]

    grant = DecodeQueue._demands

    def demand(self: DecodeQueue, *given: Any) -> list[Demand]:
        with pytest.MonkeyPatch.context() as little:
            little.setattr(Lifetimes, "first_pages", short)
            return grant(self, *given)

    patch.setattr(DecodeQueue, "_demands", demand)
    patch.setattr("workers.scheduler.prefill.ticket_refusal", lambda *_given: None)
