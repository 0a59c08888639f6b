"""Both leaders together: whatever the order of messages and steps, tokens are right and every page comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import ROUTER, Incarnation, Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import PageNews
from cluster.spec.registry import KvOwnership, PageFilter, TransferMode, Verify
from cluster.spec.transfer_messages import Drained
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import PROMPT, SENDING, answer_of, check, quiet_world
from tests.fakes.paged_ranks import PAGE_SIZE, next_token


@given(
    seed=st.integers(0, 2**32),
    cp=st.integers(1, 3),
    sending=st.sampled_from(SENDING),
    num_pages=st.integers(9, 20),
    chunk_tokens=st.integers(1, 16),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12)), min_size=1, max_size=6),
    cancels=st.lists(st.integers(0, 200), max_size=3),
    priorities=st.lists(st.integers(-2, 2), min_size=6, max_size=6),
    given_lens=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    prefix_cache=st.booleans(),
)
def test_every_request_ends_right_and_nothing_is_left(
    seed: int,
    cp: int,
    sending: tuple[KvOwnership, TransferMode, PageFilter],
    num_pages: int,
    chunk_tokens: int,
    lengths: list[tuple[int, int]],
    cancels: list[int],
    priorities: list[int],
    given_lens: list[int],
    prefix_cache: bool,
) -> None:
    ownership, mode, page_filter = sending
    num_pages -= num_pages % cp
    world = World(
        seed=seed,
        cp=cp,
        ownership=ownership,
        mode=mode,
        page_filter=page_filter,
        num_pages=num_pages,
        chunk_tokens=chunk_tokens,
        prefix_cache=prefix_cache,
    )
    rooms = []
    for index, (length, max_tokens) in enumerate(lengths):
        prompt = [(7 * index + place) % 100 for place in range(length)]
        num_given = min(given_lens[index], max_tokens - 1)
        for _ in range(num_given):
            prompt.append(next_token(prompt))
        rooms.append(world.submit(prompt, max_tokens, priority=priorities[index], num_given=num_given))
    for number, moment in enumerate(sorted(cancels)):
        for _ in range(moment):
            world.act()
        world.cancel(rooms[number % len(rooms)])
    world.run()
    check(world, num_pages)
    if not prefix_cache:
        assert not any(client.cached_tokens for client in world.clients.values())
        assert all(leader.load().cached_pages == 0 for leader in world.leaders.values())


@given(
    seed=st.integers(0, 2**32),
    cp=st.integers(1, 3),
    sending=st.sampled_from(SENDING),
    num_pages=st.integers(9, 24),
    chunk_tokens=st.integers(1, 16),
    turns=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 24), st.integers(0, 6), st.integers(1, 8), st.integers(0, 60)),
        min_size=2,
        max_size=10,
    ),
    cancels=st.lists(st.integers(0, 9), max_size=3),
)
def test_prompts_that_begin_alike_share_pages_and_nothing_else(
    seed: int,
    cp: int,
    sending: tuple[KvOwnership, TransferMode, PageFilter],
    num_pages: int,
    chunk_tokens: int,
    turns: list[tuple[int, int, int, int, int]],
    cancels: list[int],
) -> None:
    """Each prompt begins with part of an earlier prompt and its answer; requests overlap, wait and are preempted."""
    ownership, mode, page_filter = sending
    num_pages -= num_pages % cp
    world = World(
        seed=seed,
        cp=cp,
        ownership=ownership,
        mode=mode,
        page_filter=page_filter,
        num_pages=num_pages,
        chunk_tokens=chunk_tokens,
    )
    whole: list[list[int]] = [list(range(1, 25))]
    for turn, (earlier, shared_len, own_len, max_tokens, moment) in enumerate(turns):
        own = [1000 + 10 * turn + place for place in range(own_len)]
        prompt = ([*whole[earlier % len(whole)][:shared_len], *own] or [1])[: num_pages * PAGE_SIZE]
        room = world.submit(prompt, max_tokens)
        whole.append([*prompt, *answer_of(world.clients[room], num_pages)])
        if turn in cancels:
            world.cancel(room)
        for _ in range(moment):
            world.act()
    world.run()
    check(world, num_pages)


@pytest.mark.parametrize("ownership", KvOwnership)
@pytest.mark.parametrize(
    ("prompt", "cached_pages", "sent_pages"),
    [
        ([*PROMPT, 7, 7, 7], 4, 1),
        (PROMPT, 3, 0),
        (PROMPT[:-1], 3, 1),
        ([*PROMPT[: 2 * PAGE_SIZE + 1], 99, 99], 2, 1),
        ([99, *PROMPT], 0, 5),
    ],
    ids=["longer", "the same", "one token less", "parts in a page", "another beginning"],
)
def test_a_prefix_is_neither_computed_nor_sent_again(
    prompt: list[int], cached_pages: int, sent_pages: int, ownership: KvOwnership
) -> None:
    world = quiet_world(ownership=ownership)
    world.submit(PROMPT, 1)
    world.run()
    sent_before = world.num_pages_sent
    room = world.submit(prompt, 5)
    world.run()
    assert world.clients[room].cached_tokens == cached_pages * PAGE_SIZE
    assert world.num_pages_sent - sent_before == sent_pages
    check(world, 40)


def test_a_prefix_is_shared_while_its_first_request_still_runs() -> None:
    world = quiet_world()
    first = world.submit(PROMPT, 60)
    while len(world.clients[first].tokens) < 2:
        world.act()
    sent_before = world.num_pages_sent
    second = world.submit([*PROMPT, 5], 1)
    while world.clients[second].finish is None:
        world.act()
    assert world.clients[first].finish is None
    assert world.clients[second].cached_tokens == 4 * PAGE_SIZE
    assert world.num_pages_sent - sent_before == 1
    world.run()
    check(world, 40)


def test_decode_also_keeps_the_answer() -> None:
    world = quiet_world()
    first = world.submit(PROMPT, 2 * PAGE_SIZE + 1)
    world.run()
    sent_before = world.num_pages_sent
    second = world.submit([*PROMPT, *world.clients[first].tokens, 5], 1)
    world.run()
    assert world.clients[second].cached_tokens == 4 * PAGE_SIZE
    assert world.num_pages_sent - sent_before == 1


def test_messages_without_effect_are_counted_by_type() -> None:
    world = quiet_world()
    world.submit(PROMPT, 4)
    decode = world.leaders["decode/0"]
    submit = world.queues[ROUTER, "decode/0"].popleft()
    foreign = Drained(room=Room(1), generation=7, prefill=world.prefill_peer, decode_incarnation=Incarnation(1))
    for message in (submit, submit, foreign, foreign):
        decode.on_message(message, 0.0)
    assert decode.load().dropped == {"Submit": 1, "Drained": 2}


@given(seed=st.integers(0, 2**32), moment=st.integers(0, 60))
def test_a_request_that_arrives_twice_is_taken_once(seed: int, moment: int) -> None:
    world = World(
        seed=seed, cp=2, mode=TransferMode.ALL_RANKS, page_filter=PageFilter.MODULAR, num_pages=20, chunk_tokens=8
    )
    world.submit(PROMPT, 4)
    copies = {address: world.queues[ROUTER, address][-1] for address in world.leaders}
    for _ in range(moment):
        world.act()
    for address, copy in copies.items():
        world.queues[ROUTER, address].append(copy)
    world.run()
    check(world, 20)


def test_pages_are_shared_only_under_the_same_salt() -> None:
    world = quiet_world()
    rooms = []
    for salt in ("", "a", "b", "a"):
        rooms.append(world.submit(PROMPT, 1, salt))
        world.run()
    assert [world.clients[room].cached_tokens for room in rooms] == [0, 0, 0, 3 * PAGE_SIZE]


@pytest.mark.parametrize("ownership", KvOwnership)
def test_what_is_cached_gives_way_to_what_is_needed(ownership: KvOwnership) -> None:
    world = quiet_world(8, ownership)
    for first in range(0, 1000, 100):
        world.submit(list(range(first, first + 7 * PAGE_SIZE)), 4)
        world.run()
        check(world, 8)


@given(
    seed=st.integers(0, 2**32),
    cp=st.integers(1, 3),
    sending=st.sampled_from(SENDING),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    cancels=st.lists(st.integers(0, 200), max_size=3),
    prefix_cache=st.booleans(),
    flips=st.sampled_from([0.0, 0.1]),
)
def test_what_changed_on_its_way_is_never_answered(
    seed: int,
    cp: int,
    sending: tuple[KvOwnership, TransferMode, PageFilter],
    lengths: list[int],
    cancels: list[int],
    prefix_cache: bool,
    flips: float,
) -> None:
    ownership, mode, page_filter = sending
    num_pages = 12
    world = World(
        seed=seed,
        cp=cp,
        mode=mode,
        page_filter=page_filter,
        num_pages=num_pages,
        chunk_tokens=8,
        prefix_cache=prefix_cache,
        ownership=ownership,
        verify=Verify.DIGEST,
        flips=flips,
    )
    rooms = [world.submit([index * 3 + place for place in range(length)], 4) for index, length in enumerate(lengths)]
    for number in range(200):
        if number in cancels:
            world.cancel(rooms[number % len(rooms)])
        world.act()
    world.run()
    for room, client in world.clients.items():
        if client.cancelled:
            continue
        if room in world.flipped:
            assert client.tokens == []
            assert client.failure is not None
            assert client.failure.endswith("with other bytes than were sent (transfer.verify)")
        else:
            assert (client.failure, client.tokens) == (None, answer_of(client, num_pages))
    loads = [leader.load() for leader in world.leaders.values()]
    assert all(load.free_pages == load.total_pages for load in loads)
    failed = [client for client in world.clients.values() if client.failure is not None and not client.cancelled]
    assert sum(load.wrong_pages for load in loads) >= len(failed)
    assert all(leader.is_idle() for leader in world.leaders.values())


def test_pages_come_to_where_they_are_read_before_anybody_hears_of_them() -> None:
    """Also those of a request that its first token ends, for which there is nothing to compute."""
    world = quiet_world()
    world.follow_pages(world.decode_peer)
    world.submit(PROMPT, 1)
    decode, leader = world.ranks[Role.DECODE], world.leaders["decode/0"]
    while world.act():
        leader.tick(world.now_s)
        said = [message for _, message in leader.outgoing if isinstance(message, PageNews)]
        if any(news.stored for news in [*world.page_news, *said]):
            assert decode.received
            assert all(decode.read(page) == tokens for page, tokens in decode.received.items())
    world.run()
    assert any(news.stored for news in world.page_news)
    check(world, 40)
