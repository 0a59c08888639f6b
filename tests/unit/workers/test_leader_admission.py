"""Which request the leaders take next, and which they refuse."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from cluster.spec.ids import ROUTER, Incarnation, Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Cancel, Message
from cluster.spec.registry import KvOwnership, PageFilter, TransferMode
from cluster.spec.transfer_messages import Drained, Ticket
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import PROMPT
from tests.fakes.paged_ranks import PAGE_SIZE
from workers.scheduler.waiting import Waiting


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


def decode_only(num_pages: int, prefix_cache: bool = False) -> World:
    return World(
        seed=0,
        cp=1,
        mode=TransferMode.RANK0,
        page_filter=PageFilter.MODULAR,
        num_pages=num_pages,
        chunk_tokens=16,
        prefix_cache=prefix_cache,
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


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_nobody_who_waits_for_pages_is_looked_at_again_before_something_helps(
    prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = decode_only(4, prefix_cache)
    rooms = [world.submit([number, 1], 2) for number in range(4 + 768)]
    assert tickets_of(world) == rooms[:4]
    decode, looks = world.leaders["decode/0"], Counter[str]()
    for name in ("find", "can_allocate"):
        look = partial(count_call, looks, name, getattr(world.allocators[Role.DECODE], name))
        monkeypatch.setattr(world.allocators[Role.DECODE], name, look)

    decode.tick(0.0)
    decode.on_message(Cancel(room=rooms[-1], incarnation=Incarnation(1)), 0.0)
    assert not looks
    world.submit([1, 2], 2)
    assert tickets_of(world) == []
    assert not looks, "behind as many as are looked at"
    urgent = world.submit([1, 3], 2, priority=-1)
    assert tickets_of(world) == []
    assert looks["find"] == 1
    drain(world, rooms[0])
    assert [sent.room for _, sent in decode.outgoing if isinstance(sent, Ticket)] == [urgent]
    assert looks["find"] <= 1 + 256


def count_call(calls: Counter[str], name: str, call: Callable[..., object], *args: object) -> object:
    calls[name] += 1
    return call(*args)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_whoever_is_not_looked_at_again_could_not_have_had_pages(
    seed: int, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spared = tickets_of_many(seed, prefix_cache, monkeypatch)
    monkeypatch.setattr(Waiting, "untried", lambda self, _num_gains: self.candidates())
    monkeypatch.setattr(Waiting, "is_in_vain", lambda *_: False)
    assert tickets_of_many(seed, prefix_cache, monkeypatch) == spared


def tickets_of_many(seed: int, prefix_cache: bool, patch: pytest.MonkeyPatch) -> list[tuple[Room, list[int]]]:
    """The rooms that got pages in decode, in order, and which; with preemptions, choices and clients that leave."""
    world, tickets = decode_only(12, prefix_cache), []
    rng, decode = random.Random(seed), world.leaders["decode/0"]
    send = decode.send

    def note(address: str, message: Message) -> None:
        if isinstance(message, Ticket):
            tickets.append((message.room, message.pages[0]))
        send(address, message)

    patch.setattr(decode, "send", note)
    for _ in range(24):
        prompt = [rng.randrange(3)] * rng.randint(1, 8 * PAGE_SIZE)
        room = world.submit(prompt, rng.randint(1, 12), priority=rng.randint(-1, 1))
        if rng.random() < 0.3:
            world.submit(prompt, 4, prompt_of=room)
        for _ in range(rng.randrange(12)):
            world.act()
        if rng.random() < 0.2:
            world.cancel(room)
    world.run()
    assert all(leader.is_idle() for leader in world.leaders.values())
    return tickets


def drain(world: World, room: Room) -> None:
    """The request is cancelled, and prefill says that it writes no more."""
    leader = world.leaders["decode/0"]
    leader.on_message(Cancel(room=room, incarnation=Incarnation(1)), 0.0)
    drained = Drained(room=room, generation=1, prefill=world.prefill_peer, decode_incarnation=Incarnation(1))
    leader.on_message(drained, 0.0)
