"""The choices of one prompt: computed once, sent once, and kept once on decode, but for each one's last page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import ROUTER, Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Blame
from cluster.spec.registry import PageFilter, TransferMode
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import check
from tests.fakes.paged_ranks import PAGE_SIZE


def world_of(seed: int = 0, num_pages: int = 40, *, prefix_cache: bool = True) -> World:
    return World(
        seed=seed,
        cp=2,
        mode=TransferMode.ALL_RANKS,
        page_filter=PageFilter.MODULAR,
        num_pages=num_pages,
        chunk_tokens=16,
        prefix_cache=prefix_cache,
    )


def submit_choices(world: World, prompt: list[int], lengths: list[int], *, on_decode: bool = False) -> list[Room]:
    first = world.submit(prompt, lengths[0], on_decode=on_decode)
    return [first, *(world.submit(prompt, length, prompt_of=first) for length in lengths[1:])]


@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(4, 20),
    groups=st.lists(
        st.tuples(st.integers(1, 16), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 11)), max_size=3),
    prefix_cache=st.booleans(),
)
def test_every_choice_ends_right_and_nothing_is_left(
    seed: int,
    num_pages: int,
    groups: list[tuple[int, list[int], bool]],
    cancels: list[tuple[int, int]],
    prefix_cache: bool,
) -> None:
    world = world_of(seed, num_pages, prefix_cache=prefix_cache)
    rooms = [
        submit_choices(world, [(7 * number + place) % 100 for place in range(prompt_len)], lengths, on_decode=on_decode)
        for number, (prompt_len, lengths, on_decode) in enumerate(groups)
    ]
    everything = [room for group in rooms for room in group]
    for moment, number in cancels:
        for _ in range(moment):
            world.act()
        world.cancel(everything[number % len(everything)])
    world.run()
    for first, *others in rooms:
        for room in others:
            if (failure := world.clients[room].failure) is not None:
                assert world.clients[first].cancelled
                assert failure.startswith("the choice that was to bring its prompt ended: ")
                del world.clients[room]
    check(world, num_pages)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("on_decode", [True, False])
@pytest.mark.parametrize("prompt_len", [3 * PAGE_SIZE + 1, 3 * PAGE_SIZE, 2])
def test_a_prompt_is_computed_sent_and_kept_once(prompt_len: int, on_decode: bool, prefix_cache: bool) -> None:
    world = world_of(prefix_cache=prefix_cache)
    prompt = list(range(1, prompt_len + 1))
    rooms = submit_choices(world, prompt, [40] * 4, on_decode=on_decode)
    while not all(world.clients[room].tokens for room in rooms):
        world.act()
    whole_pages = (prompt_len - 1) // PAGE_SIZE
    assert world.num_pages_sent == (0 if on_decode else -(-prompt_len // PAGE_SIZE))
    assert world.num_computed[Role.PREFILL] == (0 if on_decode else prompt_len)
    tables = [world.ranks[Role.DECODE].pages[room] for room in rooms]
    assert all(table[:whole_pages] == tables[0][:whole_pages] for table in tables)
    assert len({table[whole_pages] for table in tables}) == len(rooms), "a last page is written by two"
    world.run()
    check(world, 40)


def test_choices_go_on_when_the_one_that_brought_the_prompt_ends_with_its_first_token() -> None:
    world = world_of(prefix_cache=False)
    prompt = list(range(5 * PAGE_SIZE))
    submit_choices(world, prompt, [1, 9, 9])
    world.run()
    check(world, 40)
    assert world.num_computed[Role.DECODE] == 2 * (PAGE_SIZE + 8), "more than a last page each and the answers"


def test_choices_fail_at_once_with_the_one_that_was_to_bring_the_prompt() -> None:
    world = world_of()
    first, second = submit_choices(world, [1] * 9, [4, 4])
    while world.queues["choice 2", "decode/0"] or world.queues[ROUTER, "decode/0"]:
        world.act()
    assert not world.clients[first].tokens
    world.cancel(first)
    world.run()
    reason = "the choice that was to bring its prompt ended: the request was cancelled"
    assert world.clients[second].failure == reason
    assert world.clients[second].blame is Blame.NEITHER
    assert all(leader.is_idle() for leader in world.leaders.values())


def test_a_choice_does_not_wait_for_ever_for_one_that_never_comes() -> None:
    world = world_of()
    room = world.submit([1] * 9, 4, prompt_of=Room(77))
    while world.act():
        continue
    assert not world.leaders["decode/0"].is_idle()
    world.inquire(room)
    world.run()
    assert world.leaders["decode/0"].is_idle()
    client = world.clients[room]
    assert client.failure is not None
    assert "the choice that was to bring its prompt ended: it never came" in client.failure
    assert client.blame is Blame.NEITHER
