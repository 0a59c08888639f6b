"""Allocator and prefix tree against a model that remembers whole prefixes and the time each was last used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.page_key import extend_page_keys, owner_base, page_keys
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree

PAGE_SIZE = 2
Prefix = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def prefixes_of(tokens: list[int]) -> list[Prefix]:
    return [tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)]


class Model:
    """Slow and plain: prefixes of tokens, no keys, no tree, no order."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.cached: dict[Prefix, int] = {}
        self.used_at: dict[Prefix, int] = {}
        self.sequences: list[tuple[list[int], list[int]]] = []
        self.time = 0

    def holders(self, page: int) -> int:
        return sum(page in pages for _, pages in self.sequences)

    def idle(self) -> list[Prefix]:
        return [prefix for prefix, page in self.cached.items() if not self.holders(page)]

    def num_unused(self) -> int:
        held = {page for _, pages in self.sequences for page in pages}
        return self.num_pages - len(held | set(self.cached.values()))

    def find(self, tokens: list[int]) -> list[int]:
        pages = []
        for prefix in prefixes_of(tokens):
            if prefix not in self.cached:
                break
            pages.append(self.cached[prefix])
        return pages

    def evict(self, count: int) -> None:
        for _ in range(count):
            leaves = [
                prefix
                for prefix in self.idle()
                if not any(other[: len(prefix)] == prefix for other in self.cached if len(other) > len(prefix))
            ]
            del self.cached[min(leaves, key=lambda prefix: self.used_at[prefix])]

    def share(self, number: int) -> None:
        tokens, pages = self.sequences[number]
        for prefix, page in zip(prefixes_of(tokens), pages, strict=False):
            if self.cached.setdefault(prefix, page) != page:
                break

    def let_go(self, number: int, *, kept: bool) -> None:
        tokens, pages = self.sequences.pop(number)
        self.time += 1
        for prefix, page in zip(prefixes_of(tokens), pages, strict=False):
            if kept:
                self.cached.setdefault(prefix, page)
            if kept or self.cached.get(prefix) == page:
                self.used_at[prefix] = self.time


class Pair:
    """The real thing and its model, driven together."""

    def __init__(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages, PrefixTree())
        self.model = Model(num_pages)

    def start(self, tokens: list[int]) -> None:
        allocator, model = self.allocator, self.model
        shared = allocator.find(page_keys(tokens, PAGE_SIZE))
        assert shared == model.find(tokens)
        needed = -(-len(tokens) // PAGE_SIZE)
        num_idle = sum(model.cached[prefix] not in shared for prefix in model.idle())
        can = needed - len(shared) <= model.num_unused() + num_idle
        assert allocator.can_allocate(needed, shared) == can
        if not can:
            return
        pages = allocator.allocate(needed, shared)
        assert pages[: len(shared)] == shared
        num_evicted = max(0, needed - len(shared) - model.num_unused())
        model.sequences.append((tokens, shared))
        model.evict(num_evicted)
        assert not any(page in model.cached.values() or model.holders(page) for page in pages[len(shared) :])
        model.sequences[-1] = (tokens, pages)

    def share(self, number: int) -> None:
        tokens, pages = self.model.sequences[number]
        self.model.share(number)
        self.allocator.share(pages, page_keys(tokens, PAGE_SIZE))

    def let_go(self, number: int, *, kept: bool) -> None:
        tokens, pages = self.model.sequences[number]
        self.model.let_go(number, kept=kept)
        if kept:
            self.allocator.keep(pages, page_keys(tokens, PAGE_SIZE))
        else:
            self.allocator.free(pages)

    def check(self) -> None:
        allocator, model = self.allocator, self.model
        allocator.check_integrity([page for _, pages in model.sequences for page in pages])
        assert allocator.num_cached == len(model.cached)
        assert allocator.num_free == model.num_unused() + len(model.idle())
        for prefix in model.cached:
            assert allocator.find(page_keys(prefix, PAGE_SIZE)) == model.find(list(prefix))
        for page in range(model.num_pages):
            assert allocator.is_cached(page) == (page in model.cached.values())


@given(
    num_pages=st.integers(1, 12),
    events=st.lists(
        st.one_of(TOKENS, st.tuples(st.integers(0, 9), st.sampled_from(["share", "keep", "free"]))), max_size=40
    ),
)
def test_cache_and_model_agree_on_every_page(num_pages: int, events: list[list[int] | tuple[int, str]]) -> None:
    pair = Pair(num_pages)
    for event in events:
        if isinstance(event, list):
            pair.start(event)
        elif pair.model.sequences:
            number, verb = event[0] % len(pair.model.sequences), event[1]
            if verb == "share":
                pair.share(number)
            else:
                pair.let_go(number, kept=verb == "keep")
        pair.check()
    while pair.model.sequences:
        pair.let_go(0, kept=True)
        pair.check()
    assert pair.allocator.num_free == num_pages


def test_without_a_tree_nothing_is_kept() -> None:
    allocator = PageAllocator(4)
    keys = page_keys([1, 2, 3, 4], PAGE_SIZE)
    allocator.keep(allocator.allocate(2), keys)
    assert (allocator.find(keys), allocator.num_cached, allocator.num_free) == ([], 0, 4)
    allocator.check_integrity([])


def test_a_page_that_somebody_reads_is_not_evicted() -> None:
    allocator = PageAllocator(3, PrefixTree())
    keys = page_keys([1, 2, 3, 4], PAGE_SIZE)
    allocator.keep(allocator.allocate(2), keys)
    reader = allocator.allocate(2, allocator.find(keys))
    assert allocator.num_free == 1
    assert not allocator.can_allocate(2)
    assert set(allocator.allocate(1)).isdisjoint(reader)


def test_letting_go_of_what_is_not_held_is_our_own_bug() -> None:
    allocator = PageAllocator(2, PrefixTree())
    pages = allocator.allocate(2)
    allocator.keep(pages, page_keys([1, 2, 3, 4], PAGE_SIZE))
    with pytest.raises(AssertionError, match="not held"):
        allocator.free(pages)


@given(TOKENS, TOKENS, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]))
def test_keys_are_equal_exactly_for_equal_prefixes_of_one_tenant(
    first: list[int], second: list[int], first_salt: str, second_salt: str
) -> None:
    pairs = zip(page_keys(first, PAGE_SIZE, first_salt), page_keys(second, PAGE_SIZE, second_salt), strict=False)
    for number, (ours, theirs) in enumerate(pairs, start=1):
        same = first[: number * PAGE_SIZE] == second[: number * PAGE_SIZE] and first_salt == second_salt
        assert (ours == theirs) == same


@given(TOKENS, TOKENS)
def test_keys_grow_with_their_tokens(start: list[int], rest: list[int]) -> None:
    keys = page_keys(start, PAGE_SIZE, "salt")
    extend_page_keys(keys, [*start, *rest], PAGE_SIZE, "salt")
    assert keys == page_keys([*start, *rest], PAGE_SIZE, "salt")


@given(TOKENS, st.integers(1, 8))
def test_a_growing_prompt_keeps_its_first_owner(tokens: list[int], parts: int) -> None:
    base = owner_base(tokens, PAGE_SIZE, parts)
    assert 0 <= base < parts
    if len(tokens) >= PAGE_SIZE:
        assert base == owner_base([*tokens, 5], PAGE_SIZE, parts)
