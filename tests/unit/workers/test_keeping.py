"""KV of retracted requests in host memory: nobody sees it in the tokens, and no slot is lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import Room
from cluster.spec.lifecycle import Role
from cluster.spec.registry import PageFilter, TransferMode
from cluster.spec.step_messages import HostCopy
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import check
from tests.fakes.kv import kv_pool
from tests.fakes.paged_ranks import PAGE_SIZE
from workers.cache.gpu_host_pages import GpuHostPages
from workers.cache.host_pages import HostPages
from workers.memory.page_pool import PagePool
from workers.scheduler.keeping import HostKeeper, KeepCost


def world_of(seed: int, num_pages: int, host_slots: int, *, prefix_cache: bool) -> World:
    return World(
        seed=seed,
        cp=1,
        mode=TransferMode.RANK0,
        page_filter=PageFilter.MODULAR,
        num_pages=num_pages,
        chunk_tokens=16,
        prefix_cache=prefix_cache,
        host_slots=host_slots,
    )


@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(6, 16),
    host_slots=st.integers(0, 40),
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 24), st.integers(1, 3)), min_size=1, max_size=4),
    cancels=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 20)), max_size=3),
    prefix_cache=st.booleans(),
)
def test_tokens_do_not_show_what_was_kept(
    seed: int,
    num_pages: int,
    host_slots: int,
    lengths: list[tuple[int, int, int]],
    cancels: list[tuple[int, int]],
    prefix_cache: bool,
) -> None:
    """Requests, some of several choices, over a pool that is too small for all."""
    world = world_of(seed, num_pages, host_slots, prefix_cache=prefix_cache)
    rooms: list[Room] = []
    for number, (prompt_len, max_tokens, num_choices) in enumerate(lengths):
        prompt = [(7 * number + place) % 100 for place in range(prompt_len)]
        rooms.append(first := world.submit(prompt, max_tokens))
        rooms += [world.submit(prompt, max_tokens, prompt_of=first) for _ in range(num_choices - 1)]
    for moment, number in cancels:
        for _ in range(moment):
            world.act()
        world.cancel(rooms[number % len(rooms)])
    world.run()
    for room in rooms:
        if (world.clients[room].failure or "").startswith("the choice that was to bring"):
            del world.clients[room]
    check(world, num_pages)


@pytest.mark.parametrize(("host_slots", "is_kept"), [(40, True), (0, False)])
def test_what_is_kept_is_not_computed_again(host_slots: int, is_kept: bool) -> None:
    world = world_of(3, 12, host_slots, prefix_cache=False)
    for number in range(3):
        world.submit([number] * 3 * PAGE_SIZE, 6 * PAGE_SIZE)
    world.run()
    check(world, 12)
    load = world.leaders["decode/0"].load()
    assert load.num_retracted > 0
    assert load.num_kept == (load.num_retracted if is_kept else 0)
    answers = 3 * (6 * PAGE_SIZE - 1)
    assert (world.num_computed[Role.DECODE] == answers) == is_kept


@given(
    token_s=st.floats(1e-9, 1.0),
    page_s=st.floats(1e-9, 1.0),
    num_tokens=st.integers(1, 10**6),
    num_pages=st.integers(1, 10**5),
)
def test_the_cheaper_way_is_taken(token_s: float, page_s: float, num_tokens: int, num_pages: int) -> None:
    cost = KeepCost(token_s, page_s)
    keeper = HostKeeper(10**5, cost)
    keeper.keep(Room(1), range(num_pages), num_tokens)
    assert (keeper.kept_len(Room(1)) > 0) == (2 * num_pages * page_s < num_tokens * token_s)


def test_more_than_there_is_room_for_is_computed_again() -> None:
    keeper = HostKeeper(3)
    keeper.keep(Room(1), [5, 6], 7)
    keeper.keep(Room(2), [8, 9], 8)
    assert (keeper.kept_len(Room(1)), keeper.kept_len(Room(2))) == (7, 0)
    assert keeper.restore(Room(1), [3, 4, 0], num_cached=1) == 7
    saves, loads = keeper.take_copies()
    assert [save.pages for save in saves] == [[5, 6]]
    assert [(load.pages, load.slots) for load in loads] == [([4], saves[0].slots[1:])]
    keeper.check_integrity(set())


def pool_of(num_pages: int) -> PagePool:
    pool = kv_pool(num_pages, 1, 1, 2, 4, torch.float32)
    pool.group("kv").copy_(torch.arange(num_pages + 1).view(-1, 1, 1, 1, 1, 1).expand_as(pool.group("kv")))
    return pool


@pytest.mark.parametrize("kind", [HostPages, GpuHostPages])
def test_pages_come_back_as_they_were_though_others_took_them(kind: type[HostPages] | type[GpuHostPages]) -> None:
    pool = pool_of(8)
    host = kind(pool, 4)
    host.begin([HostCopy(room=Room(1), pages=[2, 5, 7], slots=[3, 0, 1])], [])
    host.wait_for([[5]])
    pool.group("kv")[5] = -1.0
    host.finish()
    pool.group("kv")[2] = pool.group("kv")[7] = -1.0
    host.begin([], [HostCopy(room=Room(1), pages=[6, 4], slots=[0, 1])])
    host.finish()
    host.close()
    assert [float(pool.group("kv")[page].mean()) for page in (6, 4)] == [5, 7]
