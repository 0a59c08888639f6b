"""KV events that leaders send, and their receivers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.hicache_config import HicacheConfig
from cluster.spec.ids import ROUTER, Incarnation, Peer, ReplicaId, Role
from cluster.spec.kv import page_keys
from cluster.spec.messages import KvEvents, SubscribeKvEvents
from cluster.spec.registry import KvOwnership, TableSnapshot
from cluster.spec.tiers import Tier
from tests.fakes.leader_pair import LeaderPair
from tests.fakes.paged_ranks import PAGE_SIZE
from tests.fakes.pages import allocate
from tests.fakes.tier_world import TierWorld
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PageJournal, PrefixTree
from workers.scheduler import page_reporter
from workers.scheduler.page_reporter import PageReporter

ME = Peer(replica=ReplicaId("prefill-0"), incarnation=Incarnation(3), address="leader")


def router(incarnation: int = 1, name: str = ROUTER) -> Peer:
    return Peer(replica=ReplicaId(name), incarnation=Incarnation(incarnation), address=f"{name}.{incarnation}")


def cached(allocator: PageAllocator, tokens: list[int]) -> None:
    """Leave a computed prefix in the cache."""
    pages = allocate(allocator, len(tokens) // PAGE_SIZE)
    allocator.keep([pages], page_keys(tokens, PAGE_SIZE))


def reporter_of(num_pages: int = 8) -> tuple[PageReporter, PageAllocator]:
    allocator = PageAllocator(num_pages, PrefixTree())
    return PageReporter(ME, allocator), allocator


def test_a_router_gets_the_complete_cache_then_changes() -> None:
    reporter, allocator = reporter_of()
    cached(allocator, [1] * 8)
    assert reporter.changes() == []
    ((address, first),) = reporter.subscribe(router())
    assert address == "router.1"
    assert first == KvEvents(
        replica=ME.replica, incarnation=ME.incarnation, number=0, stored=page_keys([1] * 8, PAGE_SIZE), removed=[]
    )
    cached(allocator, [2] * 4)
    ((_, second),) = reporter.changes()
    assert isinstance(second, KvEvents)
    assert (second.number, second.stored) == (1, page_keys([2] * 4, PAGE_SIZE))
    allocator.flush()
    ((_, third),) = reporter.changes()
    assert isinstance(third, KvEvents)
    assert len(third.removed) == 3
    assert reporter.changes() == []


def test_an_empty_cache_is_reported_and_a_large_one_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter, allocator = reporter_of()
    assert len(reporter.subscribe(router())) == 1
    cached(allocator, list(range(28)))
    monkeypatch.setattr(page_reporter, "MAX_KEYS", 3)
    reported = [message for _, message in reporter.subscribe(router())]
    assert [news.number for news in reported if isinstance(news, KvEvents)] == [0, 1, 2]
    keys = [key for news in reported if isinstance(news, KvEvents) for key in news.stored]
    assert keys == page_keys(list(range(28)), PAGE_SIZE)


def test_subscribed_routers_get_events() -> None:
    reporter, allocator = reporter_of()
    reporter.subscribe(router(2))
    assert reporter.subscribe(router(1)) == []
    reporter.subscribe(router(1, "router-b"))
    cached(allocator, [1] * 4)
    assert [address for address, _ in reporter.changes()] == ["router.2", "router-b.1"]
    reporter.on_table(TableSnapshot(version=1, replicas=(), reaped={ROUTER: Incarnation(2)}))
    cached(allocator, [2] * 4)
    assert [address for address, _ in reporter.changes()] == ["router-b.1"]


def test_a_router_learns_that_a_page_is_gone_which_was_new_when_it_subscribed() -> None:
    reporter, allocator = reporter_of()
    reporter.subscribe(router())
    cached(allocator, [1] * 4)
    keys = page_keys([1] * 4, PAGE_SIZE)
    reported = reporter.subscribe(router(1, "router-b"))
    assert [(address, message.stored) for address, message in reported if isinstance(message, KvEvents)] == [
        ("router.1", keys),
        ("router-b.1", keys),
    ]
    allocator.flush()
    gone = [(address, message.removed) for address, message in reporter.changes() if isinstance(message, KvEvents)]
    assert gone == [("router.1", keys), ("router-b.1", keys)]


def test_nothing_is_reported_without_subscribers() -> None:
    reporter, allocator = reporter_of()
    reporter.subscribe(router())
    reporter.on_table(TableSnapshot(version=1, replicas=(), reaped={ROUTER: Incarnation(1)}))
    cached(allocator, [1] * 4)
    assert reporter.changes() == []
    ((_, reported),) = reporter.subscribe(router(2))
    assert isinstance(reported, KvEvents)
    assert reported.stored == page_keys([1] * 4, PAGE_SIZE)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.booleans()), max_size=20), st.integers(0, 20))
def test_a_journal_has_the_net_changes(steps: list[tuple[bytes, bool]], looks_at: int) -> None:
    journal, there, known = PageJournal(), set[bytes](), set[bytes]()
    for number, (key, is_stored) in enumerate(steps):
        if is_stored == (key in there):
            continue
        (there.add if is_stored else there.remove)(key)
        journal.note(key, is_stored)
        if number == looks_at:
            _take(journal, known)
            assert known == there
    _take(journal, known)
    assert known == there
    assert journal.take() == ([], [])


def _take(journal: PageJournal, known: set[bytes]) -> None:
    stored, removed = journal.take()
    assert not known.intersection(stored)
    assert known.issuperset(removed)
    known.update(stored)
    known.difference_update(removed)


@pytest.mark.parametrize("window", [None, 3])
def test_events_cover_every_tier_and_no_window(window: int | None) -> None:
    world = TierWorld(
        pages_per_owner=8,
        host_pages=8,
        window=window,
        cp=2,
        ownership=KvOwnership.REPLICATED,
        config=HicacheConfig.model_validate({"storage": {"backend": "files"}}),
        seed=1,
    )
    reporter = PageReporter(ME, world.allocator, world.tiers)
    reporter.subscribe(router())
    world.submit([1] * 6)
    world.drain()
    keys = page_keys([1] * 6, 2)
    reported = [message for _, message in reporter.changes() if isinstance(message, KvEvents)]
    assert {message.tier: sorted(message.stored) for message in reported} == {tier: sorted(keys) for tier in Tier}
    assert [message.number for message in reported] == [3, 4, 5]
    world.tiers.host.flush()
    (gone,) = [message for _, message in reporter.changes() if isinstance(message, KvEvents)]
    assert (gone.tier, sorted(gone.removed)) == (Tier.HOST, sorted(keys))
    again = [message for _, message in reporter.subscribe(router()) if isinstance(message, KvEvents)]
    assert [(message.number, message.tier, len(message.stored)) for message in again] == [
        (0, Tier.DEVICE, 3),
        (1, Tier.HOST, 0),
        (2, Tier.STORAGE, 3),
    ]


@pytest.mark.parametrize("role", Role)
def test_a_question_to_another_start_is_counted(role: Role) -> None:
    pair = LeaderPair()
    assert pair.deliver(role, SubscribeKvEvents(router=router(), incarnation=Incarnation(2))) == []
    assert pair.leaders[role].load().dropped == {"SubscribeKvEvents": 1}
