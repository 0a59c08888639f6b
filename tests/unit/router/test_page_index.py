"""The router's index of cached pages: in order, without gaps, within its bounds."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.spec.ids import Peer
from cluster.spec.kv import page_keys
from cluster.spec.messages import KvEvents
from cluster.spec.tiers import Tier
from router.page_index import CachedPages, KeySet, PageIndex, PromptKeys
from tests.fakes.bootstrap import peer_of

ONE, OTHER = peer_of("prefill-0"), peer_of("prefill-1")


def keys(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def events(number: int, stored: str = "", removed: str = "", peer: Peer = ONE) -> KvEvents:
    return KvEvents(
        replica=peer.replica,
        incarnation=peer.incarnation,
        number=number,
        stored=keys(stored),
        removed=keys(removed),
    )


def index_of(max_pages: int = 100) -> PageIndex:
    index = PageIndex(max_pages)
    assert index.update([ONE, OTHER], 0.0) == [ONE, OTHER]
    return index


def test_the_longest_prefix_counts() -> None:
    index = index_of()
    assert not index.on_kv_events(events(0, "abcx"), 0.0)
    prompts = ("abc", "abd", "abcde", "x", "xy", "q", "")
    assert [index.count(ONE, keys(prompt)) for prompt in prompts] == [3, 2, 3, 1, 1, 0, 0]
    assert index.count(OTHER, keys("abc")) == 0
    assert not index.on_kv_events(events(1, "d", "x"), 0.0)
    assert [index.count(ONE, keys(prompt)) for prompt in ("abcdx", "x")] == [4, 0]


def test_a_gap_is_detected_once_and_repaired_by_a_new_subscription() -> None:
    index = index_of()
    index.on_kv_events(events(0, "abc"), 0.0)
    assert index.on_kv_events(events(2, "f"), 0.0)
    assert index.count(ONE, keys("abc")) == 0
    assert not index.on_kv_events(events(3, "g"), 0.0)
    assert not index.on_kv_events(events(0, "ab"), 0.0)
    assert not index.on_kv_events(events(1, "c"), 0.0)
    assert not index.on_kv_events(events(0, "xy"), 0.0)
    assert (known := index.find(ONE)) is not None
    assert set(known.keys) == {b"x", b"y"}
    assert (index.num_pages, index.num_gaps) == (2, 1)


def test_old_kv_events_change_nothing() -> None:
    index = index_of()
    for number, stored in ((0, "a"), (1, "b"), (1, "z")):
        assert not index.on_kv_events(events(number, stored), 0.0)
    assert (known := index.find(ONE)) is not None
    assert set(known.keys) == {b"a", b"b"}


def test_a_silent_replica_is_asked_again_and_a_lost_one_is_forgotten() -> None:
    index = index_of()
    index.on_kv_events(events(0, "abc"), 0.0)
    assert index.update([ONE, OTHER], 4.9) == []
    assert index.update([ONE, OTHER], 5.0) == [OTHER]
    successor = peer_of("prefill-0", 2)
    assert index.update([successor, OTHER], 6.0) == [successor]
    assert (index.num_pages, index.count(ONE, keys("abc"))) == (0, 0)
    assert not index.on_kv_events(events(1, "d"), 6.0)
    assert index.num_pages == 0


def test_memory_is_bounded_over_all_replicas() -> None:
    index = index_of(max_pages=5)
    index.on_kv_events(events(0, "abc"), 0.0)
    index.on_kv_events(events(0, "abcdef", peer=OTHER), 0.0)
    assert (index.num_pages, index.count(ONE, keys("abcdef")), index.count(OTHER, keys("abcdef"))) == (5, 3, 2)
    index.on_kv_events(events(1, "xyz"), 0.0)
    assert index.num_pages == 5
    index.on_kv_events(events(2, removed="abcxyz"), 0.0)
    assert index.num_pages == 2
    index.on_kv_events(events(1, "cd", peer=OTHER), 0.0)
    assert index.count(OTHER, keys("abcdef")) == 4


def test_pages_below_the_device_count_by_where_they_are() -> None:
    index = PageIndex(4)
    index.update([ONE, OTHER], 0.0)
    reported = [
        events(0, "a"),
        replace(events(1, "bc"), tier=Tier.HOST),
        events(0, peer=OTHER),
        replace(events(1, "abcdef", peer=OTHER), tier=Tier.STORAGE),
    ]
    assert not any(index.on_kv_events(message, 0.0) for message in reported)
    one, other = index.cached([ONE, OTHER], keys("abcdef"))
    assert one == CachedPages(device=1, host=2, storage=1)
    assert other == CachedPages(storage=4), "more stored pages are kept than may be"
    assert index.cached([ONE], keys("bx")) == [CachedPages(host=1)]
    index.on_kv_events(replace(events(2, removed="b"), tier=Tier.HOST), 0.0)
    assert index.cached([ONE], keys("abc")) == [CachedPages(device=1, storage=2)], "page c comes after one of storage"
    index.on_kv_events(events(0), 0.0)
    assert index.cached([ONE], keys("abc")) == [CachedPages(storage=3)]
    assert index.count(ONE, keys("abc")) == 0


def test_the_index_keeps_the_most_recently_used_stored_pages() -> None:
    index = PageIndex(4)
    index.update([ONE], 0.0)
    reported = [
        events(0),
        *(replace(events(number, stored), tier=Tier.STORAGE) for number, stored in ((1, "abcd"), (2, "xy"))),
    ]
    assert not any(index.on_kv_events(message, 0.0) for message in reported)

    def num_stored(*prompts: str) -> list[int]:
        return [index.cached([ONE], keys(prompt))[0].storage for prompt in prompts]

    assert num_stored("abcd", "xy") == [2, 2]
    assert num_stored("ab") == [2]
    index.on_kv_events(replace(events(3, "z"), tier=Tier.STORAGE), 0.0)
    assert num_stored("ab", "xy", "z") == [2, 1, 1]
    index.on_kv_events(replace(events(4, removed="a"), tier=Tier.STORAGE), 0.0)
    assert num_stored("ab") == [0]


_KEYS = st.lists(st.binary(min_size=2, max_size=2), max_size=40)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), _KEYS), max_size=20))
def test_the_index_equals_a_set(changes: list[tuple[str, list[bytes]]]) -> None:
    keys, plain = KeySet(), set[bytes]()
    for what, changed in changes:
        if what == "add":
            keys.add_all(changed)
            plain |= set(changed)
        else:
            keys.remove_all(changed)
            plain -= set(changed)
        assert len(keys) == len(plain)
        assert set(keys) == plain
        assert all((key in keys) == (key in plain) for key in changed)


_PAGE_SIZE = 2


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(0, 40), st.integers(0, 40))
def test_a_match_ends_at_the_first_unknown_page(prompt: list[int], first: int, second: int) -> None:
    whole = page_keys(prompt[:-1], _PAGE_SIZE, "salt")
    keys = PromptKeys(prompt, _PAGE_SIZE, "salt")
    for num_known in (first, second):
        made = keys.known(whole[:num_known].__contains__)
        assert [*made] == whole[: len(made)]
        assert len(made) > num_known or len(made) == len(whole)


def test_an_unknown_prompt_is_cheap_at_any_length() -> None:
    assert len(PromptKeys([1] * 20_000, _PAGE_SIZE, "").known(lambda _: False)) < 10


def test_keys_known_from_the_start() -> None:
    prompt = [1] * 40_000
    whole = PromptKeys(prompt, _PAGE_SIZE, "").all()
    assert whole == page_keys(prompt[:-1], _PAGE_SIZE)
    assert [*PromptKeys(prompt, _PAGE_SIZE, "", whole).known(lambda _: False)] == whole
