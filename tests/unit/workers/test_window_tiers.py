"""Window attention in the tiers below the device: which pages are found, loaded and fetched."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cluster.spec.hicache_config import HicacheConfig, WritePolicy
from cluster.spec.ids import Role
from cluster.spec.kv import KvGeometry, key_value_group, lifetime_key, page_keys
from cluster.spec.memory import page_layout
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import AxisSizes, KvOwnership, RankRecord
from cluster.spec.tiers import TierJobKind, TierPage
from tests.fakes.kv import two_groups
from tests.fakes.paged_ranks import record
from tests.fakes.tier_world import PAGE_SIZE, TierWorld
from tests.unit.workers.test_tier_copies import Replica
from workers.hicache.copier import Copier
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.page_store import HEADER_BYTES, PageStore
from workers.memory.layerwise_load import LayerwiseLoad

WINDOW = 2 * PAGE_SIZE + 1
"""Window in which a token after a full page sees two pages."""
TOKENS = list(range(8 * PAGE_SIZE))
KEYS = page_keys(TOKENS, PAGE_SIZE)
TAIL = [lifetime_key(key, 1) for key in KEYS[-2:]]


def world_of(policy: WritePolicy = WritePolicy.WRITE_THROUGH, **settings: Any) -> TierWorld:
    config = {"write": policy, "storage": {"backend": "files", "prefetch": "wait_complete"}}
    shape: dict[str, Any] = {
        "pages_per_owner": 32,
        "host_pages": 64,
        "cp": 1,
        "ownership": KvOwnership.REPLICATED,
        "seed": 0,
    }
    return TierWorld(config=HicacheConfig.model_validate(config), window=WINDOW, **(shape | settings))


def serve(world: TierWorld, tokens: list[int]) -> int:
    """Run a request to its end. Return the number of cached pages with which it started."""
    world.submit(tokens)
    world.drain()
    world.finish(0)
    world.drain()
    return world.num_found[-1]


def test_a_prefix_is_loaded_from_host_memory_with_its_window() -> None:
    world = world_of(cp=2)
    assert serve(world, TOKENS) == 0
    world.allocator.flush()
    assert serve(world, TOKENS) == len(KEYS)
    assert set(TAIL) <= set(world.tree.keys())
    assert lifetime_key(KEYS[0], 1) not in world.tree.keys()  # noqa: SIM118 - a tree is no dict


@pytest.mark.parametrize("is_fresh", [False, True])
def test_without_a_page_of_the_window_a_shorter_prefix_is_loaded(*, is_fresh: bool) -> None:
    world = world_of()
    serve(world, TOKENS)
    world.allocator.flush()
    if is_fresh:
        del world.ranks[0].stored[TAIL[0]]
        world.restart()
    else:
        world.tiers.host.free(TAIL[0])
        world.tiers.attach(is_attached=False)
    assert serve(world, TOKENS) == len(KEYS) - 2


def test_the_window_of_a_device_prefix_is_loaded_from_host_memory() -> None:
    world = world_of()
    serve(world, TOKENS)
    # The window's pages are evicted first.
    world.allocator.free([page for pages in world.allocator.allocate([(16 + len(KEYS), 0)]) for page in pages])
    assert world.allocator.cached_keys() == KEYS
    assert world.allocator.count_cached(KEYS) == 0
    moved = world.tiers.state().work
    assert serve(world, TOKENS) == len(KEYS)
    (loads,) = (work for work in world.tiers.state().work if work.kind is TierJobKind.LOAD)
    assert TierJobKind.LOAD not in {work.kind for work in moved}
    assert loads.num_jobs == 1
    assert world.allocator.count_cached(KEYS) == len(KEYS)


def test_the_window_of_a_host_prefix_is_fetched_from_storage() -> None:
    world = world_of()
    serve(world, TOKENS)
    world.allocator.flush()
    for key in TAIL:
        world.tiers.host.free(key)
    assert serve(world, TOKENS) == len(KEYS)


def test_a_prompt_with_another_end_starts_after_its_stored_prefix() -> None:
    world = world_of()
    serve(world, TOKENS)
    world.restart()
    assert serve(world, [*TOKENS[: 5 * PAGE_SIZE], 99, 99, 99]) == 5


def test_a_load_that_fails_is_computed_instead() -> None:
    world = world_of(cp=2)
    serve(world, TOKENS)
    world.allocator.flush()
    world.start(TOKENS)
    while world.loading:
        world.step(0, fails=False)
        world.step(1, fails=True)
    world.drain()
    assert world.num_found == [0, 0]


def test_a_pinned_prompt_keeps_its_window() -> None:
    world = world_of(host_pages=24)
    serve(world, TOKENS)
    world.tiers.pin(KEYS, is_pinned=True)
    world.tiers.attach(is_attached=False)
    for number in range(100, 108):
        serve(world, [number] * len(TOKENS))
    world.allocator.flush()
    assert serve(world, TOKENS) == len(KEYS)


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize(
    ("cp", "ownership"), [(1, KvOwnership.REPLICATED), (2, KvOwnership.REPLICATED), (2, "sharded")]
)
def test_ranks_never_attend_to_a_page_of_others(policy: WritePolicy, cp: int, ownership: str) -> None:
    num_found: list[int] = []
    for seed in range(6):
        world = world_of(policy, cp=cp, ownership=KvOwnership(ownership), pages_per_owner=16, host_pages=8, seed=seed)
        draw = random.Random(seed)
        prompts = [[draw.randrange(3) for _ in range(4)] * 2 for _ in range(3)]
        for _ in range(400):
            match draw.randrange(9):
                case 0:
                    world.submit(draw.choice(prompts)[: draw.randrange(2, 9)] + [draw.randrange(2)] * draw.randrange(4))
                case 1 | 2:
                    world.finish(draw.randrange(9))
                case 3 if draw.random() < 0.05:
                    world.restart() if draw.random() < 0.5 else world.wipe()
                case _:
                    world.step(draw.randrange(9), fails=draw.random() < 0.1)
                    world.start_waiting()
        world.drain()
        num_found += world.num_found
    assert any(num_found)


def windowed(num_heads: int = 2) -> KvGeometry:
    """Return a geometry with a window in every second layer. One layer of each kind has an extra two-part head."""
    base = two_groups(num_layers=4, num_heads=num_heads)
    groups = (
        key_value_group((0, 2), num_heads, 4, "float32"),
        key_value_group((1, 3), num_heads, 4, "float32", WINDOW),
        msgspec.structs.replace(base.groups[1], layers=(2,)),
    )
    return msgspec.structs.replace(base, groups=groups)


@pytest.mark.parametrize("is_layerwise", [False, True])
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_pages_of_two_lifetimes_are_loaded_on_every_rank(cp: int, *, is_staged: bool, is_layerwise: bool) -> None:
    replica = Replica(cp, KvOwnership.REPLICATED, is_staged=is_staged, geometry=windowed())
    before, layout = replica.pools[0].bytes.clone(), replica.records[0].layout
    for pool in replica.pools[1:]:
        pool.bytes.copy_(before)
    pages = [
        TierPage(key=lifetime_key(b"k" * 16, number % 2), index=number, host=number, device=number + 1)
        for number in range(4)
    ]
    replica.order("save", pages)
    for copier, pool in zip(replica.copiers, replica.pools, strict=True):
        pool.bytes[1:5].zero_()
        moved = [msgspec.structs.replace(page, device=4 - page.index) for page in pages]
        if is_layerwise:
            copier.load_layerwise(moved, copier.memory.record_event(), LayerwiseLoad())
        else:
            copier.load(moved, copier.memory.record_event())
        for page in pages:
            end = layout.bytes_of(page.lifetime)
            assert torch.equal(pool.bytes[4 - page.index, :end], before[page.index + 1, :end])


class Slots:
    """Host memory of one rank."""

    def __init__(self, page_bytes: int) -> None:
        self.pages = [bytearray(page_bytes) for _ in range(4)]

    def host_page(self, slot: int) -> memoryview:
        return memoryview(self.pages[slot])


def rank_of(rank: int, sizes: AxisSizes) -> RankRecord:
    geometry, coords = windowed(), coords_of(rank, sizes)
    base = record(Role.PREFILL, coords.cp, sizes.cp, num_pages=1)
    layout = page_layout(geometry, sizes, coords)
    return msgspec.structs.replace(base, coords=coords, sizes=sizes, geometry=geometry, layout=layout)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 4)])
def test_ranks_store_only_the_groups_of_a_pages_lifetime(tmp_path: Path, tp: int, pp: int) -> None:
    sizes, failures = AxisSizes(dp=1, cp=2, tp=tp, pp=pp), Counter[str]()
    pages = [TierPage(key=lifetime_key(b"k" * 16, number), index=0, host=2 * number) for number in range(2)]
    backend = FileStorage(tmp_path, 1 << 20)
    num_bytes = 0
    for rank in range(world_size(sizes)):
        mine = rank_of(rank, sizes)
        there, here = Slots(mine.layout.page_bytes), Slots(mine.layout.page_bytes)
        source, target = (Copier([mine], 0, slots, None) for slots in (there, here))  # type: ignore[arg-type]
        store = PageStore(backend, mine, "w")
        owned = [page for page in pages if source.owns(page)]
        assert len(owned) == (0 if mine.coords.cp else 1 if pp == 4 else 2)
        for page in owned:
            source.host_page(page)[:] = bytes([rank + 1]) * source.bytes_of(page)
            num_bytes += source.bytes_of(page)
        assert all(store.store(owned, source.host_page, float("inf"), failures))
        assert all(store.fetch(owned, target.host_page, float("inf"), failures))
        assert here.pages == there.pages
    assert num_bytes == windowed().bytes_per_token * windowed().page_size + (tp - 1) * extra_bytes()
    stored = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert sum(stored) == num_bytes + len(stored) * HEADER_BYTES
    assert not failures


def extra_bytes() -> int:
    """Return the bytes of the head that both TP ranks have."""
    return windowed().groups[2].bytes_per_token * windowed().page_size
