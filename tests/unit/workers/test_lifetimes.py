"""Pages that later tokens need only for a while: which are kept, cached and freed."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.kv import NO_PAGE, KvGeometry, Lifetime, key_value_group, page_keys
from workers.cache.lifetimes import Lifetimes, PageLists, live_pages
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree

PAGE_SIZE = 4
TOKENS = list(range(1, 33))
KEYS = page_keys(TOKENS, PAGE_SIZE)


def allocator_of(num_pages: int, window: int | None = 6) -> PageAllocator:
    lifetimes = Lifetimes(PAGE_SIZE, (Lifetime(None), Lifetime(window)))
    return PageAllocator(num_pages, PrefixTree(), lifetimes=lifetimes)


def computed(allocator: PageAllocator, num_pages: int) -> PageLists:
    """Return the pages of a request that has grown page by page and freed the pages outside its window."""
    pages = allocator.allocate([(num_pages, 0)] * 2)
    for done in range(1, num_pages + 1):
        allocator.put_into_cache(pages, KEYS[:done], done - 1)
        seen = allocator.lifetimes.visible(pages, done * PAGE_SIZE)
        allocator.free([page for page in live_pages(pages) if page not in live_pages(seen)])
        pages = seen
    return pages


@given(st.integers(1, 40), st.integers(0, 200), st.integers(1, 9))
def test_a_page_is_needed_while_a_later_token_sees_part_of_it(window: int, num_tokens: int, page_size: int) -> None:
    seen = {at // page_size for later in range(num_tokens, num_tokens + 3) for at in range(later - window + 1, later)}
    needed = [page for page in sorted(seen) if page >= 0] or [num_tokens // page_size]
    assert Lifetime(window).first_page(num_tokens, page_size) == min(needed[0], num_tokens // page_size)
    assert Lifetime(None).first_page(num_tokens, page_size) == 0


def test_groups_of_one_window_share_a_list_and_the_longest_lifetime_is_kept_whole() -> None:
    def geometry(*windows: int | None) -> KvGeometry:
        groups = tuple(key_value_group([layer], 1, 2, "float32", window) for layer, window in enumerate(windows))
        return KvGeometry(model="m", num_layers=len(groups), groups=groups, page_size=PAGE_SIZE)

    mixed = geometry(8, None, 16, 8)
    assert mixed.lifetimes == (Lifetime(None), Lifetime(16), Lifetime(8))
    assert [mixed.lifetime_of(group) for group in mixed.groups] == [2, 0, 1, 2]
    assert geometry(8, 8).lifetimes == (Lifetime(None),)


def test_a_prefix_is_continued_where_the_cache_has_all_that_its_next_token_sees() -> None:
    allocator = allocator_of(16)
    pages = computed(allocator, 6)
    assert pages[1][:4] == [NO_PAGE] * 4
    assert allocator.num_cached == 12
    allocator.free(live_pages(pages))
    for length in range(7):
        whole, windowed = allocator.find(KEYS[:length])
        assert len(whole) == len(windowed) == length
        assert [page != NO_PAGE for page in windowed] == [at >= length - 2 for at in range(length)]
    allocator.check_integrity([])


def test_without_a_page_of_the_window_a_prefix_ends_before_it() -> None:
    allocator = allocator_of(12)
    pages = computed(allocator, 6)
    # The window's freed pages are the least recently used ones.
    assert len(allocator.allocate([(2, 0)])[0]) == 2
    assert [allocator.count_cached(KEYS[:length]) for length in range(7)] == [0, 0, 0, 0, 4, 5, 6]
    assert allocator.count_cached(KEYS[:3]) == len(allocator.find(KEYS[:3])[0]) == 0
    assert live_pages(pages)


def test_a_prefix_without_its_window_is_whole_again_once_it_has_been_computed_again() -> None:
    """The second request keeps copies of the first lifetime's pages. Only those of the window are missing."""
    allocator = allocator_of(24)
    first = computed(allocator, 6)
    evicted = allocator.allocate([(allocator.num_free, 0)])
    allocator.free(live_pages(evicted))
    assert [allocator.count_cached(KEYS[:length]) for length in range(7)] == [0, 0, 0, 0, 0, 0, 6]
    second = allocator.allocate([(3, 0)] * 2)
    assert allocator.put_into_cache(second, KEYS[:3]) == 0
    allocator.check_integrity(live_pages(first) + live_pages(second))
    assert allocator.count_cached(KEYS[:3]) == 3
    for pages in (second, first):
        allocator.keep(pages, KEYS[: len(pages[0])])
    allocator.check_integrity([])


@given(st.integers(1, 8), st.integers(1, 30))
def test_cached_pages_can_be_found_and_none_is_lost(num_pages: int, window: int) -> None:
    allocator = allocator_of(2 * num_pages, window)
    pages = computed(allocator, num_pages)
    held = live_pages(pages)
    allocator.check_integrity(held)
    allocator.keep(pages, KEYS[:num_pages])
    allocator.check_integrity([])
    found = allocator.find(KEYS[:num_pages])
    assert allocator.lifetimes.can_continue(found)
    assert len(found[0]) == num_pages
    allocator.allocate([], live_pages(found))
    allocator.check_integrity(live_pages(found))
    allocator.free(live_pages(found))
    allocator.flush()
    assert allocator.num_free == allocator.num_pages
    assert allocator.num_cached == 0


def test_pages_of_a_window_are_not_reported_to_routers() -> None:
    allocator = allocator_of(8)
    computed(allocator, 3)
    assert allocator.cached_keys() == KEYS[:3]
