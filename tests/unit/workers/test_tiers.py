"""Tiers against ranks that lag behind their leader, and fail: no page is ever found with the tokens of another."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.spec.config import HicacheConfig, WritePolicy
from cluster.spec.registry import KvOwnership
from cluster.spec.tiers import MoveKind, PagesMoved, TierPage
from tests.fakes.tier_world import TierWorld
from workers.hicache.host_index import HostIndex
from workers.hicache.orders import Orders, Outcome

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
EVENTS = st.lists(
    st.one_of(
        TOKENS.map(lambda tokens: ("start", tokens)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["step", "step", "step", "fail"]), st.integers(0, 3)),
    ),
    max_size=80,
)


def world_of(
    policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    *,
    cp: int = 1,
    ownership: KvOwnership = KvOwnership.REPLICATED,
    device_pages: int = 8,
    host_pages: int = 8,
    seed: int = 0,
) -> TierWorld:
    return TierWorld(
        pages_per_owner=device_pages,
        host_pages=host_pages,
        cp=cp,
        ownership=ownership,
        config=HicacheConfig(write=policy),
        seed=seed,
    )


@settings(max_examples=150)
@given(
    policy=st.sampled_from(WritePolicy),
    cp=st.integers(1, 3),
    ownership=st.sampled_from(KvOwnership),
    device_pages=st.integers(3, 8),
    host_pages=st.integers(1, 8),
    seed=st.integers(0, 99),
    events=EVENTS,
)
def test_no_page_is_found_with_the_tokens_of_another(
    policy: WritePolicy,
    cp: int,
    ownership: KvOwnership,
    device_pages: int,
    host_pages: int,
    seed: int,
    events: list[tuple[str, list[int] | int]],
) -> None:
    world = world_of(policy, cp=cp, ownership=ownership, device_pages=device_pages, host_pages=host_pages, seed=seed)
    for name, value in events:
        if isinstance(value, list):
            world.start(value)
        elif name == "finish":
            world.finish(value)
        else:
            world.step(value, fails=name == "fail")
        world.check()
    world.drain()
    world.check_device()
    assert not world.loading
    while world.requests:
        world.finish(0)
    assert world.allocator.num_free == world.allocator.num_pages


@pytest.mark.parametrize("ownership", KvOwnership)
@pytest.mark.parametrize("policy", WritePolicy)
def test_what_the_device_gave_up_comes_back_from_host_memory(policy: WritePolicy, ownership: KvOwnership) -> None:
    world = world_of(policy, cp=2, ownership=ownership)
    old, new = [0] * 8, [1] * 8
    for _ in range(3):
        world.start(old)
        world.drain()
        world.finish(0)
    world.drain()
    world.allocator.flush()
    world.start(old)
    world.drain()
    assert world.num_loaded == 4
    world.start(new)
    world.drain()
    assert world.num_loaded == 4


def test_a_failed_load_is_computed() -> None:
    world = world_of()
    world.start([0] * 8)
    world.drain()
    world.finish(0)
    world.allocator.flush()
    world.start([0] * 8)
    assert world.loading
    while world.loading:
        world.step(0, fails=True)
    world.drain()
    world.check_device()
    assert world.num_loaded == 0


def test_selective_writing_waits_for_the_second_request_that_finds_a_page() -> None:
    world = world_of(WritePolicy.WRITE_THROUGH_SELECTIVE)
    kept = []
    for _ in range(3):
        world.start([0] * 8)
        world.drain()
        world.finish(0)
        kept.append(world.tiers.host.num_used)
    assert kept == [0, 0, 4]


def test_the_least_recently_used_page_goes_and_pinned_and_held_ones_stay() -> None:
    index = HostIndex(3, 1)
    for key in (b"a", b"b", b"c"):
        assert index.reserve(key, 0) is not None
        index.fill(key)
    index.touch([b"a"])
    index.pin([b"b"], is_pinned=True)
    index.reserve(b"d", 0)
    assert index.find([b"b", b"a", b"c"]) == [1, 0]
    index.hold([b"a"])
    assert index.reserve(b"e", 0) is None
    index.release([b"a"])
    assert index.reserve(b"e", 0) == 0
    index.flush()
    assert index.filled_keys() == [b"b"]
    index.check_integrity()


def test_an_order_is_over_when_every_rank_has_answered_once() -> None:
    orders, ended = Orders(2), list[Outcome]()
    pages = [TierPage(key=bytes([number]), place=number, host=number) for number in range(3)]
    orders.give(MoveKind.FETCH, pages, ended.append)
    (order,) = orders.outgoing
    assert orders.on_answer(PagesMoved(number=order.number, global_rank=0, done=[True, True, False]), 1.0)
    assert not orders.on_answer(PagesMoved(number=order.number, global_rank=0, done=[True, True, False]), 1.0)
    assert not orders.on_answer(PagesMoved(number=order.number + 1, global_rank=1, done=[]), 1.0)
    assert not ended
    assert orders.on_answer(
        PagesMoved(number=order.number, global_rank=1, done=[True, False, True], failures={"corrupt": 1}), 1.0
    )
    (outcome,) = ended
    assert (outcome.done, outcome.num_leading, outcome.failures["corrupt"]) == ([True, False, False], 1, 1)
