"""What a prefill leader is told by others than the decode replica and start of its request changes nothing."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from cluster.spec.ids import ROUTER, Incarnation, ReplicaId, Room
from cluster.spec.messages import Cancel, Message
from cluster.spec.peer import Peer
from cluster.spec.sampling import FinishReason
from cluster.spec.step_messages import SendReport
from cluster.spec.transfer_messages import Drained, Revoke, SendState, Ticket
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import PROMPT, quiet_world

OTHERS: dict[str, Callable[[Peer], Peer]] = {
    "another replica": lambda peer: replace(peer, replica=ReplicaId("decode-7"), address="decode/7"),
    "an earlier start": lambda peer: replace(peer, incarnation=Incarnation(0)),
}


def world_with_ticket(*, has_submit: bool) -> tuple[World, Room, Ticket]:
    """Prefill knows the table, and the request if it has the Submit; decode's ticket is on its way."""
    world = quiet_world()
    room = world.submit(PROMPT, 4)
    for member in ("prefill/0", "decode/0"):
        world.leaders[member].on_message(world.queues["bootstrap", member].popleft(), 0.0)
    world.deliver("decode/0", world.queues[ROUTER, "decode/0"].popleft())
    if has_submit:
        world.deliver("prefill/0", world.queues[ROUTER, "prefill/0"].popleft())
    ticket = next(message for queue in world.queues.values() for message in queue if isinstance(message, Ticket))
    return world, room, ticket


def revoke_of(ticket: Ticket) -> Revoke:
    return Revoke(
        room=ticket.room,
        generation=ticket.generation,
        decode=ticket.decode,
        prefill_incarnation=ticket.prefill_incarnation,
    )


def assert_dropped(world: World, message: Message, times: int = 1) -> None:
    before = world.leaders["prefill/0"].load().dropped.get(type(message).__name__, 0)
    world.leaders["prefill/0"].on_message(message, 0.0)
    assert world.leaders["prefill/0"].load().dropped.get(type(message).__name__, 0) == before + times


def assert_right(world: World, room: Room) -> None:
    world.run()
    client = world.clients[room]
    assert (client.failure, client.finish) == (None, FinishReason.LENGTH)
    assert all(leader.is_idle() for leader in world.leaders.values())


@pytest.mark.parametrize("other", OTHERS)
def test_a_ticket_of_another_is_dropped(other: str) -> None:
    world, room, ticket = world_with_ticket(has_submit=True)
    assert_dropped(world, replace(ticket, decode=OTHERS[other](ticket.decode)))
    assert_right(world, room)


@pytest.mark.parametrize("other", OTHERS)
def test_a_ticket_of_another_that_comes_early_is_dropped_with_the_request(other: str) -> None:
    world, room, ticket = world_with_ticket(has_submit=False)
    assert_dropped(world, replace(ticket, decode=OTHERS[other](ticket.decode)), times=0)
    world.deliver("prefill/0", world.queues[ROUTER, "prefill/0"].popleft())
    assert world.leaders["prefill/0"].load().dropped == {"Ticket": 1}
    assert_right(world, room)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("has_ticket", [False, True])
def test_a_revoke_of_another_is_dropped(other: str, *, has_ticket: bool) -> None:
    world, room, ticket = world_with_ticket(has_submit=True)
    if has_ticket:
        world.leaders["prefill/0"].on_message(ticket, 0.0)
    assert_dropped(world, replace(revoke_of(ticket), decode=OTHERS[other](ticket.decode)))
    assert_right(world, room)


def test_a_revoke_of_another_ticket_is_dropped() -> None:
    world, room, ticket = world_with_ticket(has_submit=True)
    world.leaders["prefill/0"].on_message(ticket, 0.0)
    assert_dropped(world, replace(revoke_of(ticket), generation=ticket.generation + 1))
    assert_right(world, room)


@pytest.mark.parametrize("kind", [Ticket, Revoke, Cancel])
def test_what_is_meant_for_another_start_is_dropped(kind: type[Message]) -> None:
    world, room, ticket = world_with_ticket(has_submit=True)
    earlier = Incarnation(0)
    messages: dict[type[Message], Message] = {
        Ticket: replace(ticket, prefill_incarnation=earlier),
        Revoke: replace(revoke_of(ticket), prefill_incarnation=earlier),
        Cancel: Cancel(room=room, incarnation=earlier),
    }
    assert_dropped(world, messages[kind])
    assert_right(world, room)


def test_reports_of_another_ticket_prove_nothing() -> None:
    """Every rank says of another generation that it writes nothing more; decode must not hear so of this one."""
    world, room, ticket = world_with_ticket(has_submit=True)
    prefill = world.leaders["prefill/0"]
    prefill.on_message(ticket, 0.0)
    prefill.next_plan()
    prefill.on_message(revoke_of(ticket), 0.0)
    for rank in range(world.cp):
        report = SendReport(room=room, generation=ticket.generation + 1, sender_rank=rank, state=SendState.DRAINED)
        assert_dropped(world, report)
    prefill.tick(1.0)
    assert not any(isinstance(message, Drained) for _, message in prefill.outgoing)
