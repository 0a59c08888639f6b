"""Pinned prompts stay in host memory under any pressure, and leave room for others."""

import pytest

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.kv import page_keys
from tests.fakes.tier_world import PAGE_SIZE, TierWorld
from tests.unit.workers.test_tiers import world_of
from workers.hicache.policy.host_index import HostIndex

SYSTEM = [0] * 4
ONE, OTHER = [*SYSTEM, *[1] * 4], [*SYSTEM, *[2] * 4]


def keys_of(tokens: list[int]) -> list[bytes]:
    return page_keys(tokens, PAGE_SIZE)


def serve(world: TierWorld, tokens: list[int]) -> None:
    world.submit(tokens)
    world.drain()
    world.finish(0)
    world.drain()


def pin(world: TierWorld, tokens: list[int], *, is_pinned: bool = True) -> None:
    world.tiers.pin(keys_of(tokens), is_pinned=is_pinned)
    world.advance()
    world.drain()


def num_here(world: TierWorld, tokens: list[int]) -> int:
    return world.num_in_host(tokens)


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("is_pinned_first", [True, False])
def test_a_pinned_prompt_is_kept_under_any_policy_and_order(policy: WritePolicy, *, is_pinned_first: bool) -> None:
    world = world_of(policy, device_pages=64, host_pages=16)
    if is_pinned_first:
        pin(world, ONE)
        assert world.tiers.num_pinned_of(keys_of(ONE)) == 0
    serve(world, ONE)
    if not is_pinned_first:
        pin(world, ONE)
    assert world.tiers.num_pinned_of(keys_of(ONE)) == world.tiers.state().num_pinned == 4
    world.tiers.host.flush()
    assert num_here(world, ONE) == 4
    pin(world, ONE, is_pinned=False)
    assert world.tiers.num_pinned_of(keys_of(ONE)) == world.tiers.state().num_pinned == 0
    world.tiers.host.flush()
    assert num_here(world, ONE) == 0


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_pinned_prompt_that_was_not_copied_is_copied_when_it_is_found_again(policy: WritePolicy) -> None:
    world = world_of(policy, device_pages=64, host_pages=16)
    world.tiers.pin(keys_of(ONE), is_pinned=True)
    world.start(ONE)
    while world.ranks[0].inbox or world.ranks[0].copies:
        world.step(0, fails=True)
    assert num_here(world, ONE) == 0
    serve(world, ONE)
    assert world.tiers.num_pinned_of(keys_of(ONE)) == 4


@pytest.mark.parametrize("policy", WritePolicy)
def test_shared_pages_stay_while_one_of_two_prompts_is_pinned(policy: WritePolicy) -> None:
    world = world_of(policy, device_pages=64, host_pages=16)
    for tokens in (ONE, OTHER):
        for _ in range(2):
            pin(world, tokens)
        serve(world, tokens)
    assert world.tiers.state().num_pinned == 6
    pin(world, SYSTEM, is_pinned=False)
    pin(world, ONE, is_pinned=False)
    world.tiers.host.flush()
    assert (num_here(world, ONE), num_here(world, OTHER)) == (2, 4)
    pin(world, OTHER, is_pinned=False)
    assert world.tiers.state().num_pinned == 0


def test_half_of_host_memory_is_left_for_others() -> None:
    index = HostIndex(4, 2)
    assert not index.pins.refusal(keys_of(ONE))
    index.pin(keys_of(ONE), is_pinned=True)
    assert not index.pins.refusal(keys_of(ONE))
    refusal = "3 of 4 host pages of one CP rank would be pinned, up from 2; allowed: at most 2"
    assert index.pins.refusal(keys_of(OTHER)) == refusal
    index.pin(keys_of(ONE), is_pinned=False)
    assert not index.pins.refusal(keys_of(OTHER))
    alone = HostIndex(7, 1).pins
    assert alone.refusal(keys_of(ONE)) == "4 of 7 host pages would be pinned, up from 0; allowed: at most 3"


@pytest.mark.parametrize("cp", [1, 2])
def test_an_idle_replica_stops_moving_pages_despite_many_pins(cp: int) -> None:
    world = world_of(WritePolicy.WRITE_BACK, cp=cp, device_pages=16, host_pages=6)
    pin(world, [0] * 6)
    serve(world, [0] * 6)
    world.allocator.flush()
    serve(world, [1] * 30)
    assert world.tiers.state().num_pinned == 3
    assert not any(rank.inbox or rank.copies for rank in world.ranks)
