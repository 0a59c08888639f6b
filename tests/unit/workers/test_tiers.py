"""Tiers against ranks that lag behind their leader, and fail: no page is ever found with the tokens of another."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.spec.hicache_config import HicacheConfig, PrefetchPolicy, WritePolicy
from cluster.spec.ids import Room
from cluster.spec.page_key import page_keys
from cluster.spec.registry import KvOwnership
from cluster.spec.tiers import TierJobKind
from tests.fakes.tier_world import PAGE_SIZE, TierWorld
from workers.hicache.policy.prefetcher import LONGEST_S

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["submit", "serve"]), TOKENS),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["pin", "pin", "unpin"]), st.integers(0, 9)),
        st.tuples(st.sampled_from(["forget", "flush", "restart", "wipe"]), st.integers(0, 9)),
        st.tuples(st.sampled_from(["drain", "resume", "attach", "detach"]), st.integers(0, 9)),
        st.tuples(st.sampled_from(["step", "step", "step", "fail"]), st.integers(0, 3)),
    ),
    max_size=80,
)


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
                "storage": {"backend": backend, "prefetch": prefetch, "prefetch_min_tokens": 1, "prefetch_base_s": 0.3},
            }
        ),
        seed=seed,
    )


class PinModel:
    """What is pinned, the long way round."""

    def __init__(self, world: TierWorld) -> None:
        self._world = world
        self._prompts: dict[bytes, list[bytes]] = {}
        self._here: set[bytes] = set()

    def pin(self, keys: list[bytes], *, is_pinned: bool) -> None:
        if not keys or (is_pinned and self._world.tiers.refusal_to_pin(keys)):
            return
        self._world.tiers.pin(keys, is_pinned=is_pinned)
        self._world.advance()
        self._prompts.pop(keys[-1], None)
        if is_pinned:
            self._prompts[keys[-1]] = keys

    def restart(self) -> None:
        self._prompts.clear()

    def check(self) -> None:
        """A pinned page that has come stays."""
        filled = set(self._world.tiers.host.filled_keys())
        pinned = {key for keys in self._prompts.values() for key in keys}
        assert self._here & pinned <= filled, "a pinned page was given up"
        self._here = pinned & filled
        assert self._here <= {key for key in filled if self._world.tiers.host.is_busy(key)}


def happen(world: TierWorld, name: str) -> None:
    """Events that concern the whole replica."""
    match name:
        case "forget":
            world.allocator.flush()
        case "flush":
            world.tiers.flush()
        case "restart":
            world.restart()
        case "wipe":
            world.wipe()
        case "drain" | "resume":
            world.tiers.drain(is_draining=name == "drain")
        case "attach" | "detach":
            world.tiers.attach(is_attached=name == "attach")
    world.advance()


@settings(max_examples=150)
@given(
    policy=st.sampled_from(WritePolicy),
    prefetch=st.sampled_from(PrefetchPolicy),
    backend=st.sampled_from(["none", "files"]),
    cp=st.integers(1, 3),
    ownership=st.sampled_from(KvOwnership),
    device_pages=st.integers(3, 8),
    host_pages=st.integers(1, 8),
    seed=st.integers(0, 99),
    events=EVENTS,
)
@example(
    policy=WritePolicy.WRITE_BACK,
    prefetch=PrefetchPolicy.BEST_EFFORT,
    backend="none",
    cp=1,
    ownership=KvOwnership.REPLICATED,
    device_pages=8,
    host_pages=4,
    seed=0,
    events=[("serve", [0] * 4), ("pin", 0), ("flush", 0), ("serve", [1] * 12)],
)
def test_no_page_is_found_with_the_tokens_of_another(
    policy: WritePolicy,
    prefetch: PrefetchPolicy,
    backend: str,
    cp: int,
    ownership: KvOwnership,
    device_pages: int,
    host_pages: int,
    seed: int,
    events: list[tuple[str, list[int] | int]],
) -> None:
    world = world_of(
        policy,
        prefetch,
        backend=backend,
        cp=cp,
        ownership=ownership,
        device_pages=device_pages,
        host_pages=host_pages,
        seed=seed,
    )
    prompts = [tokens for name, tokens in events if isinstance(tokens, list)]
    pins = PinModel(world)
    for name, value in events:
        if isinstance(value, list):
            world.submit(value)
            if name == "serve":
                world.drain()
                world.finish(-1)
        elif name == "finish":
            world.finish(value)
        elif name in ("pin", "unpin"):
            if prompts:
                pins.pin(page_keys(prompts[value % len(prompts)], PAGE_SIZE), is_pinned=name == "pin")
        elif name in ("step", "fail"):
            world.step(value, fails=name == "fail")
        else:
            happen(world, name)
            if name == "restart":
                pins.restart()
        world.start_waiting()
        world.check()
        pins.check()
    world.drain()
    world.check_device()
    assert not world.loading
    while world.requests:
        world.finish(0)
    assert world.allocator.num_free == world.allocator.num_pages
    world.drain()
    pins.check()


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


@pytest.mark.parametrize("ownership", KvOwnership)
@pytest.mark.parametrize("policy", WritePolicy)
def test_what_was_computed_before_a_restart_comes_back_from_storage(
    policy: WritePolicy, ownership: KvOwnership
) -> None:
    world = world_of(policy, cp=3, ownership=ownership, backend="files")
    for _ in range(3):
        world.submit([0] * 12)
        world.drain()
        world.finish(0)
    world.drain()
    world.restart()
    for length in (8, 10):
        world.submit([0] * length)
        world.drain()
        world.finish(0)
    assert (world.num_loaded, world.num_fetched) == (5, 5)
    assert world.tree.num_pages == 5


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_a_request_waits_for_storage_as_long_as_the_policy_says(policy: PrefetchPolicy) -> None:
    world = world_of(prefetch=policy, backend="files")
    world.submit([0] * 8)
    world.drain()
    world.restart()
    world.submit([0] * 8)
    waited_s = 0.0
    while world.tiers.is_waiting(Room(2), waited_s):
        deadline_s = world.tiers.next_deadline_s()
        assert deadline_s is not None
        waited_s = deadline_s
    expected = {PrefetchPolicy.BEST_EFFORT: 0.0, PrefetchPolicy.TIMEOUT: 0.3 + 0.25 * 8 / 1000}
    assert waited_s - world.now_s == pytest.approx(expected.get(policy, LONGEST_S))


def test_storage_that_fails_or_is_late_is_left_alone_for_a_while() -> None:
    world = world_of(prefetch=PrefetchPolicy.TIMEOUT, backend="files")
    for number in range(3):
        assert not world.tiers.next_deadline_s()
        world.submit([number + 1] * 8)
        assert world.tiers.is_waiting(Room(number + 1), world.now_s)
        world.now_s += 1.0
        world.start_waiting()
    world.submit([9] * 8)
    assert not world.tiers.is_waiting(Room(4), world.now_s)
    world.drain()
    world.now_s += 100.0
    world.submit([8] * 8)
    assert world.tiers.is_waiting(Room(5), world.now_s)


def test_what_a_request_will_find_in_host_memory_is_not_given_up_for_others() -> None:
    world = world_of(backend="files")
    for tokens in ([0] * 8, [1] * 8):
        world.submit(tokens)
        world.drain()
        world.finish(0)
    assert world.tiers.host.num_used == world.tiers.host.num_pages
    keys = page_keys([0] * 8, PAGE_SIZE)
    world.tiers.expect(Room(9), keys, world.now_s)
    assert world.tiers.host.reserve(b"another", 0) is not None
    assert len(world.tiers.host.find(keys)) == 4


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
        assert len(world.tiers.host.find(page_keys(long, PAGE_SIZE))) == 7
    world.submit([1] * 6)
    world.drain()
    world.finish(0)
    world.drain()
    found = len(world.tiers.host.find(page_keys(long, PAGE_SIZE)))
    resident = sum(key in world.tiers.host for key in page_keys(long, PAGE_SIZE))
    assert found == resident >= 5


@pytest.mark.parametrize("policy", WritePolicy)
def test_what_storage_missed_it_is_given_when_it_is_used_again(policy: WritePolicy) -> None:
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


def test_nobody_waits_for_pages_while_storage_is_left_alone_or_detached() -> None:
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
