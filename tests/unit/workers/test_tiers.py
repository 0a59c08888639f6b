"""Tiers with ranks that fail and lag behind their leader: no page is ever found with another page's tokens."""

import pytest

from cluster.spec.hicache_config import HicacheConfig, PrefetchPolicy, WritePolicy
from cluster.spec.ids import Room
from cluster.spec.kv import page_keys
from cluster.spec.registry import KvOwnership
from cluster.spec.tiers import TierJobKind
from tests.fakes.tier_world import PAGE_SIZE, TierWorld
from workers.hicache.policy.prefetcher import LONGEST_S


def world_of(
    policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
    *,
    backend: str = "none",
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
        config=HicacheConfig.model_validate(
            {
                "write": policy,
                "storage": {"backend": backend, "prefetch": prefetch},
            }
        ),
        seed=seed,
    )


def test_selective_writing_waits_for_the_second_request_that_finds_a_page() -> None:
    world = world_of(WritePolicy.WRITE_THROUGH_SELECTIVE)
    kept = []
    for _ in range(3):
        world.start([0] * 8)
        world.drain()
        world.finish(0)
        kept.append(world.tiers.host.num_used)
    assert kept == [0, 0, 4]


def test_a_page_that_is_computed_again_while_it_is_saved_is_saved_again() -> None:
    world = world_of()
    world.start([0] * 8)
    world.finish(0)
    world.allocator.flush()
    world.start([0] * 8)
    world.drain()
    assert (world.num_in_host([0] * 8), world.tiers.state().num_lost) == (4, 0)


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_a_request_waits_for_storage_as_long_as_the_policy_says(policy: PrefetchPolicy) -> None:
    world = world_of(prefetch=policy, backend="files")
    world.submit([0] * 8)
    world.drain()
    world.restart()
    world.submit([0] * 8)
    waited_s = 0.0
    while world.tiers.prefetcher.is_waiting(Room(2), waited_s):
        deadline_s = world.tiers.prefetcher.next_deadline_s(waited_s)
        assert deadline_s is not None
        waited_s = deadline_s
    assert world.tiers.prefetcher.next_deadline_s(waited_s) is None, "the loop of the leader would not sleep"
    expected = {PrefetchPolicy.BEST_EFFORT: 0.0, PrefetchPolicy.TIMEOUT: 1.0 + 0.25 * 8 / 1000}
    assert waited_s - world.now_s == pytest.approx(expected.get(policy, LONGEST_S))


def test_failing_or_slow_storage_is_paused() -> None:
    world = world_of(prefetch=PrefetchPolicy.TIMEOUT, backend="files")
    for number in range(3):
        assert not world.tiers.prefetcher.next_deadline_s(world.now_s)
        world.submit([number + 1] * 8)
        assert world.tiers.prefetcher.is_waiting(Room(number + 1), world.now_s)
        world.now_s += 2.0
        world.start_waiting()
    world.submit([9] * 8)
    assert not world.tiers.prefetcher.is_waiting(Room(4), world.now_s)
    world.drain()
    world.now_s += 100.0
    world.submit([8] * 8)
    assert world.tiers.prefetcher.is_waiting(Room(5), world.now_s)


def test_host_pages_that_a_request_will_load_are_not_evicted() -> None:
    world = world_of(backend="files")
    for tokens in ([0] * 8, [1] * 8):
        world.submit(tokens)
        world.drain()
        world.finish(0)
    assert world.tiers.host.num_used == world.tiers.host.num_pages
    keys = page_keys([0] * 8, PAGE_SIZE)
    world.tiers.expect(Room(9), keys, world.now_s)
    assert world.tiers.host.reserve(b"another", 0) is not None
    assert world.num_in_host([0] * 8) == 4


def test_detached_storage_is_neither_asked_nor_given_anything() -> None:
    world = world_of(backend="files")
    world.tiers.attach(is_attached=False)
    world.submit([0] * 8)
    world.drain()
    assert not world.ranks[0].stored
    assert [work.kind for work in world.tiers.state().work] == [TierJobKind.SAVE]
    world.tiers.attach(is_attached=True)
    world.submit([1] * 8)
    world.drain()
    assert len(world.ranks[0].stored) == 4
    without = world_of(backend="none")
    without.tiers.attach(is_attached=True)
    assert not without.tiers.state().is_attached


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_host_memory_gives_up_the_end_of_a_prefix_first(policy: WritePolicy) -> None:
    world = world_of(policy, device_pages=64)
    long = [0] * 16
    for tokens in (long, [1] * 2):
        world.submit(tokens)
        world.drain()
        world.finish(0)
        world.drain()
    if policy is WritePolicy.WRITE_THROUGH:
        assert world.num_in_host(long) == 7
    world.submit([1] * 6)
    world.drain()
    world.finish(0)
    world.drain()
    found = world.num_in_host(long)
    resident = sum(key in world.tiers.host for key in page_keys(long, PAGE_SIZE))
    assert found == resident >= 5


@pytest.mark.parametrize("policy", WritePolicy)
def test_pages_missing_from_storage_are_stored_after_it_resumes(policy: WritePolicy) -> None:
    world = world_of(policy, backend="files", device_pages=64, host_pages=64)
    world.tiers.attach(is_attached=False)
    for is_attached in (False, False, False, True, True):
        world.tiers.attach(is_attached=is_attached)
        world.submit([0] * 8)
        world.drain()
        world.finish(0)
        world.drain()
    assert len(world.ranks[0].stored) == 4


def test_a_page_whose_write_failed_is_written_when_it_is_used_again() -> None:
    world = world_of(backend="files", device_pages=64, host_pages=64)
    world.submit([0] * 8)
    world.start_waiting()
    rank = world.ranks[0]
    while world.waiting or rank.inbox or rank.copies:
        world.step(0, fails=bool(rank.copies) and rank.copies[0].kind is TierJobKind.STORE)
        world.start_waiting()
    world.finish(0)
    assert not rank.stored
    assert world.tiers.host.num_used == 4
    world.now_s += 100.0
    world.submit([0] * 8)
    world.drain()
    assert len(rank.stored) == 4


def test_no_request_waits_for_pages_while_storage_is_paused_or_detached() -> None:
    world = world_of(backend="files", device_pages=64, host_pages=64)
    world.start([0] * 8)
    assert world.tiers.state().is_storing
    world.tiers.attach(is_attached=False)
    world.advance()
    assert not world.tiers.state().is_storing
    world.tiers.attach(is_attached=True)
    rank = world.ranks[0]
    for number in range(3):
        world.start([number] * 8)
        while rank.inbox or rank.copies:
            world.step(0, fails=bool(rank.copies) and rank.copies[0].kind is TierJobKind.STORE)
    world.start([3] * 8)
    world.drain()
    assert world.tiers.state().num_opened == 1
    assert world.tiers.state().num_waiting == 4
    assert not world.tiers.state().is_storing
