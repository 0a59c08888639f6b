"""Which request the leaders take next, and which they refuse."""

import pytest

from cluster.spec.ids import ROUTER, Incarnation, Room
from cluster.spec.messages import Cancel
from cluster.spec.registry import KvOwnership, PageFilter, TransferMode
from cluster.spec.transfer_messages import Drained, Ticket
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import PROMPT
from tests.fakes.paged_ranks import PAGE_SIZE


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
