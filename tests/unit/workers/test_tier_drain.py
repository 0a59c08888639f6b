"""Storing the caches of a replica before its end, and the report of completion."""

import pytest

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.kv import page_keys
from cluster.spec.registry import KvOwnership
from tests.fakes.tier_world import PAGE_SIZE
from tests.unit.workers.test_tiers import world_of
from workers.hicache.policy.storage_writer import RENEW_S


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_replica_that_drains_stores_all_that_only_host_memory_has(
    policy: WritePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.hicache.policy.storage_writer.MARGIN", 1)
    world = world_of(policy, backend="files", device_pages=64, host_pages=64)
    world.tiers.attach(is_attached=policy is WritePolicy.WRITE_BACK)
    for _ in range(3):
        world.submit([0] * 8)
        world.drain()
        world.finish(0)
        world.drain()
    world.tiers.pin(world.tiers.host.filled_keys()[-1:], is_pinned=True)
    world.tiers.attach(is_attached=True)
    world.drain()
    assert len(world.ranks[0].stored) < 4 == world.tiers.host.num_used
    assert not world.tiers.state().is_storing
    world.tiers.drain(is_draining=True)
    world.advance()
    assert world.tiers.state().is_storing
    world.drain()
    assert len(world.ranks[0].stored) == 4
    assert not world.tiers.state().is_storing


@pytest.mark.parametrize("ownership", KvOwnership)
@pytest.mark.parametrize("cp", [1, 3])
def test_a_replica_that_drains_under_write_back_stores_all_that_only_its_device_has(
    cp: int, ownership: KvOwnership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.hicache.policy.host_writer.MARGIN", 0)
    world = world_of(WritePolicy.WRITE_BACK, cp=cp, ownership=ownership, backend="files", device_pages=64, host_pages=2)
    for tokens in ([0] * 24, [0] * 4 + [1] * 8):
        world.submit(tokens)
        world.drain()
    world.finish(0)
    world.drain()
    assert not any(rank.stored for rank in world.ranks)
    world.tiers.drain(is_draining=True)
    world.advance()
    assert world.tiers.state().is_storing
    world.tiers.drain(is_draining=True)
    world.drain()
    stored = {key for rank in world.ranks for key in rank.stored}
    assert stored == {*page_keys([0] * 24, PAGE_SIZE), *page_keys([0] * 4 + [1] * 8, PAGE_SIZE)}
    state = world.tiers.state()
    assert (state.is_storing, state.num_waiting, state.num_lost) == (False, 0, 0)
    world.submit([2] * 8)
    world.drain()
    assert len({key for rank in world.ranks for key in rank.stored}) == len(stored) + 4, "what comes while it drains"
    world.tiers.drain(is_draining=False)
    world.submit([3] * 8)
    world.drain()
    assert len({key for rank in world.ranks for key in rank.stored}) == len(stored) + 4


def test_a_replica_drains_although_host_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.hicache.policy.host_writer.MARGIN", 0)
    world = world_of(WritePolicy.WRITE_BACK, backend="files", device_pages=64, host_pages=2)
    world.submit([0] * 24)
    world.drain()
    world.tiers.attach(is_attached=False)
    world.tiers.drain(is_draining=True)
    world.advance()
    assert (world.tiers.state().is_storing, world.tiers.state().num_waiting) == (False, 0)
    for key in (b"one", b"other"):
        assert world.tiers.host.reserve(key, 0) is not None
    world.tiers.attach(is_attached=True)
    world.advance()
    assert (world.tiers.state().is_storing, world.tiers.state().num_waiting) == (False, 12)
    world.tiers.host.free(b"one")
    world.advance()
    assert world.tiers.state().is_storing
    world.drain()
    assert len(world.ranks[0].stored) == 12


@pytest.mark.parametrize("ownership", KvOwnership)
@pytest.mark.parametrize("policy", WritePolicy)
def test_a_draining_replica_restores_pages_lost_from_storage(policy: WritePolicy, ownership: KvOwnership) -> None:
    world = world_of(policy, cp=2, ownership=ownership, backend="files", device_pages=64, host_pages=64)
    keys = set(page_keys([0] * 24, PAGE_SIZE))
    for is_wiped in (False, True):
        for _ in range(3):
            world.submit([0] * 24)
            world.drain()
            world.finish(0)
            world.drain()
        world.tiers.drain(is_draining=True)
        world.advance()
        assert world.tiers.state().is_storing
        world.drain()
        assert {key for rank in world.ranks for key in rank.stored} == keys
        state = world.tiers.state()
        assert (state.is_storing, state.num_waiting, state.num_lost) == (False, 0, 0)
        assert world.num_written == (2 if is_wiped else 1) * len(keys)
        world.tiers.drain(is_draining=True)
        world.advance()
        assert not world.tiers.state().is_storing, "it is drained again"
        world.tiers.drain(is_draining=False)
        world.wipe()


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE])
def test_lost_pages_are_stored_again_on_use_and_none_twice(policy: WritePolicy) -> None:
    world = world_of(policy, backend="files", device_pages=64, host_pages=64)

    def use(times: int) -> None:
        for _ in range(times):
            world.submit([0] * 8)
            world.drain()
            world.finish(0)
            world.drain()

    use(3)
    world.wipe()
    use(3)
    assert not world.ranks[0].stored
    world.now_s += RENEW_S
    use(1)
    assert len(world.ranks[0].stored) == 4
    for _ in range(5):
        world.now_s += RENEW_S
        use(2)
    assert world.num_written == 8


def test_space_is_freed_only_by_pages_that_storage_still_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.hicache.policy.host_writer.MARGIN", 0)
    world = world_of(WritePolicy.WRITE_BACK, backend="files", device_pages=64, host_pages=4)
    world.submit([0] * 8)
    world.drain()
    world.finish(0)
    for _ in range(2):
        world.tiers.drain(is_draining=True)
        world.advance()
        world.drain()
        assert len(world.ranks[0].stored) == 4
        world.tiers.drain(is_draining=False)
    world.allocator.flush()
    world.wipe()
    world.submit([1] * 8)
    world.drain()
    world.finish(0)
    world.tiers.drain(is_draining=True)
    world.advance()
    world.drain()
    assert set(world.ranks[0].stored) == {*page_keys([0] * 8, PAGE_SIZE), *page_keys([1] * 8, PAGE_SIZE)}


def test_paused_storage_is_offered_its_pages_again() -> None:
    world = world_of(backend="files", device_pages=64, host_pages=64)
    for is_attached in (True, False, True):
        world.tiers.attach(is_attached=is_attached)
        world.submit([0] * 8)
        world.drain()
        world.finish(0)
        world.drain()
        assert bool(world.ranks[0].stored) is is_attached
        world.wipe()
