"""Both leaders together: whatever the order of messages and steps, tokens are right and every page comes back."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import ROUTER, Incarnation, Room
from cluster.spec.messages import Cancel, TableUpdate
from cluster.spec.registry import KvOwnership, PageFilter, TransferMode, Verify
from cluster.spec.sampling import FinishReason
from cluster.spec.step_messages import ForgetPeer
from cluster.spec.transfer_messages import Drained, Ticket
from tests.fakes.handoff import Client, World
from tests.fakes.paged_ranks import PAGE_SIZE, next_token, sampled_of

SENDING = [
    *((KvOwnership.REPLICATED, mode, page_filter) for mode in TransferMode for page_filter in PageFilter),
    (KvOwnership.SHARDED, TransferMode.ALL_RANKS, PageFilter.MODULAR),
]
"""Where a prefill rank's KV lives, and what of it a rank sends."""


def answer_of(client: Client, num_pages: int) -> list[int]:
    """The tokens that the fake model gives, as far as a pool of so many pages lets it; the first needs no room."""
    tokens = list(client.prompt)
    for _ in range(client.max_tokens - client.num_given):
        tokens.append(next_token(tokens))
    return tokens[len(client.prompt) : max(num_pages * PAGE_SIZE, len(client.prompt) + 1)]


def check(world: World, num_pages: int) -> None:
    """Every client has its tokens, and nothing is held."""
    for client in world.clients.values():
        wanted = answer_of(client, num_pages)
        if client.cancelled:
            assert client.tokens == wanted[: len(client.tokens)]
        else:
            assert client.failure is None, client.failure
            assert client.tokens == wanted
            assert client.finish is FinishReason.LENGTH
        assert client.logprobs == [sampled_of(token_id).logprobs for token_id in client.tokens]
        assert client.cached_tokens in range(0, len(client.prompt), PAGE_SIZE)
    for leader in world.leaders.values():
        assert leader.is_idle()
        load = leader.load()
        assert load.free_pages == load.total_pages == num_pages


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
    """Each prompt begins with part of an earlier prompt and its answer; requests overlap, wait and are retracted."""
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


def quiet_world(num_pages: int = 40, ownership: KvOwnership = KvOwnership.REPLICATED) -> World:
    return World(
        seed=1,
        cp=2,
        ownership=ownership,
        mode=TransferMode.ALL_RANKS,
        page_filter=PageFilter.MODULAR,
        num_pages=num_pages,
        chunk_tokens=16,
    )


PROMPT = list(range(1, 4 * PAGE_SIZE + 1))


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


@given(seed=st.integers(0, 2**32), moment=st.integers(0, 120), num_requests=st.integers(1, 5))
def test_requests_of_a_lost_router_are_given_up(seed: int, moment: int, num_requests: int) -> None:
    world = World(
        seed=seed,
        cp=2,
        mode=TransferMode.ALL_RANKS,
        page_filter=PageFilter.MODULAR,
        num_pages=60,
        chunk_tokens=8,
    )
    for number in range(num_requests):
        world.submit([number, *PROMPT], 40)
    for _ in range(moment):
        world.act()
    world.lose_router()
    world.run()
    check(world, 60)


def test_pages_come_back_when_router_and_prefill_are_both_proven_gone() -> None:
    world = quiet_world()
    world.submit(PROMPT, 4)
    decode = world.leaders["decode/0"]
    decode.on_message(world.queues[ROUTER, "decode/0"].popleft(), 0.0)
    reaped = {ROUTER: Incarnation(1)}
    decode.on_message(TableUpdate(snapshot=msgspec.structs.replace(world.table(), reaped=reaped)), 0.0)
    assert not decode.is_idle(), "prefill has a ticket and may write"
    reaped[world.prefill_peer.replica] = Incarnation(1)
    decode.on_message(TableUpdate(snapshot=msgspec.structs.replace(world.table(), reaped=reaped)), 0.0)
    decode.tick(1.0)
    assert decode.is_idle()
    decode.check_integrity()


def test_ranks_hear_once_of_a_decode_replica_that_is_gone() -> None:
    world = quiet_world()
    prefill = world.leaders["prefill/0"]
    for _ in range(2):
        reaped = {world.decode_peer.replica: Incarnation(1)}
        prefill.on_message(TableUpdate(snapshot=msgspec.structs.replace(world.table(), reaped=reaped)), 0.0)
    told = [message for _, message in prefill.outgoing if isinstance(message, ForgetPeer)]
    assert told == [ForgetPeer(replica=world.decode_peer.replica, incarnation=Incarnation(1))] * world.cp


def test_too_much_quarantine_ends_the_replica_when_nothing_else_is_at_hand() -> None:
    """Prefill never answers the Revoke: time alone frees nothing, but in the end there are new pages elsewhere."""
    world = quiet_world(num_pages=10)
    decode = world.leaders["decode/0"]
    for _ in range(2):
        world.submit([1] * 3 * PAGE_SIZE, 4)
    submits = list(world.queues[ROUTER, "decode/0"])
    for submit in submits:
        decode.on_message(submit, 0.0)
    decode.on_message(Cancel(room=submits[0].room, incarnation=Incarnation(1)), 0.0)
    decode.tick(59.0)
    assert (decode.load().quarantined_pages, decode.load().draining) == (0, False)
    decode.tick(60.0)
    assert (decode.load().quarantined_pages, decode.load().draining, decode.must_end) == (3, True, "")
    decode.on_message(Cancel(room=submits[1].room, incarnation=Incarnation(1)), 60.0)
    decode.tick(61.0)
    assert decode.must_end == ""
    decode.tick(120.0)
    assert decode.must_end == (
        "6 of 10 pages are in quarantine, more than 0.25 of them (transfer.quarantine_limit): "
        "prefill-0 did not say that it writes no more"
    )


def test_messages_without_effect_are_counted_by_type() -> None:
    world = quiet_world()
    world.submit(PROMPT, 4)
    decode = world.leaders["decode/0"]
    submit = world.queues[ROUTER, "decode/0"].popleft()
    foreign = Drained(room=Room(1), generation=7, prefill=world.prefill_peer, decode_incarnation=Incarnation(1))
    for message in (submit, submit, foreign, foreign):
        decode.on_message(message, 0.0)
    assert decode.load().dropped == {"Submit": 1, "Drained": 2}


def test_a_request_whose_router_is_lost_is_not_decoded_to_its_end() -> None:
    world = quiet_world(num_pages=300)
    room = world.submit(PROMPT, 1000)
    while len(world.clients[room].tokens) < 3:
        world.act()
    world.lose_router()
    world.run()
    check(world, 300)
    assert len(world.clients[room].tokens) < 100


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


@pytest.mark.parametrize(
    ("mode", "page_filter", "words"),
    [
        (TransferMode.RANK0, PageFilter.MODULAR, "transfer mode rank0 and sharded KV, which only all_ranks can send"),
        (
            TransferMode.ALL_RANKS,
            PageFilter.CONTIGUOUS,
            "page filter contiguous and sharded KV, which only modular can send",
        ),
    ],
)
def test_sharded_kv_that_cannot_be_sent_is_refused_when_the_pair_meets(
    mode: TransferMode, page_filter: PageFilter, words: str
) -> None:
    world = World(
        seed=0,
        cp=2,
        ownership=KvOwnership.SHARDED,
        mode=mode,
        page_filter=page_filter,
        num_pages=8,
        chunk_tokens=8,
    )
    room = world.submit(PROMPT, 4)
    world.run()
    assert (world.clients[room].failure or "").endswith(f"prefill-0 has {words}")
    assert all(leader.is_idle() for leader in world.leaders.values())


def test_a_prompt_larger_than_the_pool_is_refused_in_words() -> None:
    world = World(
        seed=0, cp=2, mode=TransferMode.ALL_RANKS, page_filter=PageFilter.MODULAR, num_pages=4, chunk_tokens=8
    )
    room = world.submit([1] * 17, 4)
    world.run()
    assert world.clients[room].failure in (
        "the prompt needs 5 pages, prefill-0 has 4",
        "the prompt needs 5 pages, decode-0 has 4",
    )
    assert all(leader.is_idle() for leader in world.leaders.values())


def tickets_of(world: World) -> list[Room]:
    """Rooms that the decode leader has sent a ticket for, in order; Submits are delivered and nothing else happens."""
    tickets = []
    for message in world.queues[ROUTER, "decode/0"]:
        leader = world.leaders["decode/0"]
        leader.on_message(message, 0.0)
        tickets += [sent.room for _, sent in leader.outgoing if isinstance(sent, Ticket)]
        leader.outgoing.clear()
    world.queues[ROUTER, "decode/0"].clear()
    return tickets


def decode_only(num_pages: int) -> World:
    return World(
        seed=0,
        cp=1,
        mode=TransferMode.RANK0,
        page_filter=PageFilter.MODULAR,
        num_pages=num_pages,
        chunk_tokens=16,
        prefix_cache=False,
    )


def test_short_prompts_pass_a_long_one_that_waits_for_decode_pages_until_as_many_passed_as_it_wants() -> None:
    world = decode_only(20)
    world.submit([1] * 10 * PAGE_SIZE, 1)
    world.submit([2] * 12 * PAGE_SIZE, 1)
    assert len(tickets_of(world)) == 1
    for _ in range(6):
        short = world.submit([3] * 2 * PAGE_SIZE, 1)
        assert tickets_of(world) == [short]
        drain(world, short)
        world.leaders["decode/0"].outgoing.clear()
    world.submit([3] * 2 * PAGE_SIZE, 1)
    assert tickets_of(world) == []


def test_an_urgent_request_gets_decode_pages_first_and_the_oldest_is_not_put_off_for_ever() -> None:
    world = decode_only(10)
    first = world.submit([1] * 10 * PAGE_SIZE, 1)
    assert tickets_of(world) == [first]
    usual, urgent = world.submit([2] * 8 * PAGE_SIZE, 1), world.submit([3] * 8 * PAGE_SIZE, 1, priority=-1)
    others = [world.submit([4] * 8 * PAGE_SIZE, 1, priority=-1) for _ in range(2)]
    order = tickets_of(world)
    world.queues[ROUTER, "prefill/0"].clear()
    leader = world.leaders["decode/0"]
    for ended in (first, urgent, usual):
        drain(world, ended)
        order += [sent.room for _, sent in leader.outgoing if isinstance(sent, Ticket)]
        leader.outgoing.clear()
    assert order == [urgent, usual, others[0]]


def drain(world: World, room: Room) -> None:
    """The request is cancelled, and prefill says that it writes no more."""
    leader = world.leaders["decode/0"]
    leader.on_message(Cancel(room=room, incarnation=Incarnation(1)), 0.0)
    drained = Drained(room=room, generation=1, prefill=world.prefill_peer, decode_incarnation=Incarnation(1))
    leader.on_message(drained, 0.0)


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
