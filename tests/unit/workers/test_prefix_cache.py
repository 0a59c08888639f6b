"""Allocator and prefix tree compared with a model that records whole prefixes and their last use."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.kv import extend_page_keys, owner_base, page_keys
from tests.fakes.pages import allocate, can_allocate
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree

PAGE_SIZE = 2
Prefix = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def prefixes_of(tokens: list[int]) -> list[Prefix]:
    return [tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)]


class Model:
    """Slow and simple model: prefixes of tokens without keys, tree or order."""

    def __init__(self, num_pages: int, num_owners: int) -> None:
        self.num_pages, self.num_owners = num_pages, num_owners
        self.cached: dict[Prefix, int] = {}
        self.used_at: dict[Prefix, int] = {}
        self.sequences: list[tuple[list[int], list[int]]] = []
        self.time = 0

    def holders(self, page: int) -> int:
        return sum(page in pages for _, pages in self.sequences)

    def idle(self) -> list[Prefix]:
        return [prefix for prefix, page in self.cached.items() if not self.holders(page)]

    def unused(self) -> set[int]:
        held = {page for _, pages in self.sequences for page in pages}
        return set(range(self.num_pages)) - held - set(self.cached.values())

    def count(self, pages: Iterable[int]) -> list[int]:
        """Count pages by owner."""
        owners = [page % self.num_owners for page in pages]
        return [owners.count(owner) for owner in range(self.num_owners)]

    def find(self, tokens: list[int]) -> list[int]:
        pages = []
        for prefix in prefixes_of(tokens):
            if prefix not in self.cached:
                break
            pages.append(self.cached[prefix])
        return pages

    def evict(self, counts: list[int]) -> None:
        """Evict each owner's oldest idle prefix with all its extensions, until enough pages are free."""
        before = self.count(self.cached.values())
        for owner, count in enumerate(counts):
            while before[owner] - self.count(self.cached.values())[owner] < count:
                own = [prefix for prefix in self.idle() if self.cached[prefix] % self.num_owners == owner]
                oldest = min(own, key=lambda prefix: (self.used_at[prefix], -len(prefix)))
                below = [prefix for prefix in self.cached if prefix[: len(oldest)] == oldest]
                assert set(below) <= set(self.idle())
                for prefix in below:
                    del self.cached[prefix]

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
    """Product and model, driven together."""

    def __init__(self, pages_per_owner: int, num_owners: int) -> None:
        self.allocator = PageAllocator(pages_per_owner, PrefixTree(num_owners), num_owners)
        self.model = Model(pages_per_owner * num_owners, num_owners)
        self.num_shared: list[int] = []
        """Number of shared pages for each sequence of the model, from its last ``share``."""

    def start(self, tokens: list[int]) -> None:
        allocator, model = self.allocator, self.model
        base = owner_base(tokens, PAGE_SIZE, model.num_owners)
        shared = allocator.find(page_keys(tokens, PAGE_SIZE))[0]
        assert shared == model.find(tokens)
        needed = -(-len(tokens) // PAGE_SIZE)
        new = model.count(base + index for index in range(len(shared), needed))
        unused = model.count(model.unused())
        idle = model.count(page for prefix in model.idle() if (page := model.cached[prefix]) not in shared)
        can = all(wanted <= there for wanted, there in zip(new, map(sum, zip(unused, idle, strict=True)), strict=True))
        assert can_allocate(allocator, needed, shared, base) == can
        if not can:
            return
        pages = allocate(allocator, needed, shared, base)
        assert pages[: len(shared)] == shared
        assert all(page % model.num_owners == (base + index) % model.num_owners for index, page in enumerate(pages))
        model.sequences.append((tokens, shared))
        model.evict([max(0, wanted - there) for wanted, there in zip(new, unused, strict=True)])
        assert not any(page in model.cached.values() or model.holders(page) for page in pages[len(shared) :])
        model.sequences[-1] = (tokens, pages)
        self.num_shared.append(0)

    def share(self, number: int) -> None:
        tokens, pages = self.model.sequences[number]
        self.model.share(number)
        keys = page_keys(tokens, PAGE_SIZE)
        self.num_shared[number] = self.allocator.put_into_cache([pages], keys, self.num_shared[number])

    def let_go(self, number: int, *, kept: bool) -> None:
        tokens, pages = self.model.sequences[number]
        self.model.let_go(number, kept=kept)
        del self.num_shared[number]
        if kept:
            self.allocator.keep([pages], page_keys(tokens, PAGE_SIZE))
        else:
            self.allocator.free(pages)

    def check(self) -> None:
        allocator, model = self.allocator, self.model
        allocator.check_integrity([page for _, pages in model.sequences for page in pages])
        assert allocator.num_cached == len(model.cached)
        idle = [model.cached[prefix] for prefix in model.idle()]
        assert allocator.num_free == model.num_owners * min(model.count([*model.unused(), *idle]))
        for prefix in model.cached:
            assert allocator.find(page_keys(prefix, PAGE_SIZE))[0] == model.find(list(prefix))
        for page in range(model.num_pages):
            assert allocator.is_cached(page) == (page in model.cached.values())


@given(
    pages_per_owner=st.integers(1, 12),
    num_owners=st.integers(1, 4),
    events=st.lists(
        st.one_of(TOKENS, st.tuples(st.integers(0, 9), st.sampled_from(["share", "keep", "free"]))), max_size=40
    ),
)
def test_cache_and_model_agree_on_every_page(
    pages_per_owner: int, num_owners: int, events: list[list[int] | tuple[int, str]]
) -> None:
    pair = Pair(pages_per_owner, num_owners)
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
    assert pair.allocator.num_free == pair.allocator.num_pages


def test_without_a_tree_nothing_is_kept() -> None:
    allocator = PageAllocator(4)
    keys = page_keys([1, 2, 3, 4], PAGE_SIZE)
    allocator.keep([allocate(allocator, 2)], keys)
    assert (allocator.find(keys)[0], allocator.num_cached, allocator.num_free) == ([], 0, 4)
    allocator.check_integrity([])


def test_a_page_in_use_is_not_evicted() -> None:
    allocator = PageAllocator(3, PrefixTree())
    keys = page_keys([1, 2, 3, 4], PAGE_SIZE)
    allocator.keep([allocate(allocator, 2)], keys)
    reader = allocate(allocator, 2, allocator.find(keys)[0])
    assert allocator.num_free == 1
    assert not can_allocate(allocator, 2)
    assert set(allocate(allocator, 1)).isdisjoint(reader)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=6), st.integers(1, 4))
def test_every_owner_holds_its_part_of_each_request(requests: list[tuple[int, int]], num_owners: int) -> None:
    """One rank's memory is 1 / n of the total, plus up to one page per request."""
    allocator = PageAllocator(240, num_owners=num_owners)
    held: list[int] = []
    for count, base in requests:
        pages = allocate(allocator, count // 2, first_owner=base)
        pages += allocate(allocator, count - count // 2, first_owner=base + len(pages))
        assert [page % num_owners for page in pages] == [(base + index) % num_owners for index in range(count)]
        for owner in range(num_owners):
            local = [page // num_owners for page in pages if page % num_owners == owner]
            assert abs(len(local) - count / num_owners) < 1
            assert len(set(local)) == len(local)
            assert all(0 <= page < 240 for page in local)
        held += pages
        allocator.check_integrity(held)


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 8), st.integers(1, 60))
def test_an_empty_pool_takes_what_its_owners_hold_together(
    pages_per_owner: int, num_owners: int, base: int, count: int
) -> None:
    allocator = PageAllocator(pages_per_owner, num_owners=num_owners)
    assert can_allocate(allocator, count, first_owner=base) == (count <= pages_per_owner * num_owners)


def test_an_owner_evicts_its_oldest_page_and_its_descendants() -> None:
    allocator = PageAllocator(3, PrefixTree(2), 2)
    old, new = page_keys([1, 2, 3, 4, 5, 6], PAGE_SIZE), page_keys([7, 8, 9, 10], PAGE_SIZE)
    allocator.keep([allocate(allocator, 3)], old)
    allocator.keep([allocate(allocator, 2)], new)
    held = allocate(allocator, 1, first_owner=1)
    assert (len(allocator.find(old)[0]), len(allocator.find(new)[0])) == (3, 2)
    held += allocate(allocator, 1, first_owner=1)
    assert (len(allocator.find(old)[0]), len(allocator.find(new)[0])) == (1, 2)
    assert allocator.num_free == 2
    held += allocate(allocator, 1, first_owner=0)
    assert (len(allocator.find(old)[0]), len(allocator.find(new)[0])) == (1, 2)
    allocator.check_integrity(held)


def test_a_request_waits_for_the_fullest_owner() -> None:
    allocator = PageAllocator(2, num_owners=2)
    allocate(allocator, 1, first_owner=1)
    assert allocator.num_free == 2
    assert not can_allocate(allocator, 3, first_owner=1)
    assert can_allocate(allocator, 3, first_owner=0)


def test_releasing_an_unheld_page_is_a_bug() -> None:
    allocator = PageAllocator(2, PrefixTree())
    pages = allocate(allocator, 2)
    allocator.keep([pages], page_keys([1, 2, 3, 4], PAGE_SIZE))
    with pytest.raises(AssertionError, match="not held"):
        allocator.free(pages)


def test_pages_that_are_given_up_for_others_are_counted() -> None:
    allocator = PageAllocator(4, PrefixTree())
    allocator.keep([allocate(allocator, 2)], page_keys([1, 2, 3, 4], PAGE_SIZE))
    allocator.free(allocate(allocator, 2))
    assert (allocator.num_cached, allocator.num_evicted) == (2, 0)
    allocator.free(allocate(allocator, 3))
    assert (allocator.num_cached, allocator.num_evicted) == (1, 1)
    allocator.flush()
    assert (allocator.num_cached, allocator.num_evicted) == (0, 1)


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
