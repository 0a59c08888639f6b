"""What leaders answer to a router that has heard nothing, and what they ask themselves."""

from msgspec.structs import replace

from cluster.spec.ids import ROUTER, Incarnation, Room
from cluster.spec.messages import INQUIRE_EVERY_S, Blame, Cancel, Failure, Inquire, Message, Submit
from cluster.spec.peer import Peer
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import PROMPT, check, quiet_world

ME = Peer(replica=ROUTER, incarnation=Incarnation(1), address=ROUTER)


def answers(world: World, *rooms: Room, incarnation: int = 1) -> list[Message]:
    """What decode says when it is asked about these."""
    decode = world.leaders["decode/0"]
    decode.outgoing = []
    decode.on_message(Inquire(rooms=list(rooms), sender=ME, incarnation=Incarnation(incarnation)), 0.0)
    return [message for address, message in decode.outgoing if address == ROUTER]


def reason_of(world: World, room: Room) -> str:
    (failure,) = answers(world, room)
    assert isinstance(failure, Failure)
    assert (failure.room, failure.retryable, failure.blame) == (room, True, Blame.NEITHER)
    return failure.reason


def test_a_request_that_never_came_need_not_come_any_more() -> None:
    world = quiet_world()
    room = world.submit(PROMPT, 4)
    assert reason_of(world, room) == "has nothing more to say of the request: it never came"
    world.cancel(room)
    world.run()
    check(world, 40)
    assert not world.clients[room].tokens


def test_a_request_that_has_ended_is_told_again() -> None:
    world = quiet_world()
    room = world.submit(PROMPT, 4)
    world.run()
    check(world, 40)
    assert reason_of(world, room) == "has nothing more to say of the request: length"


def test_nothing_is_said_of_a_request_in_work() -> None:
    world = quiet_world()
    room = world.submit(PROMPT, 40)
    while world.leaders["decode/0"].is_idle():
        world.act()
    while len(world.clients[room].tokens) < 3:
        assert answers(world, room) == []
        world.act()


def test_a_request_whose_pages_are_still_waited_for_is_over() -> None:
    world = quiet_world()
    room = world.submit(PROMPT, 4)
    decode = world.leaders["decode/0"]
    decode.on_message(world.queues[ROUTER, "decode/0"].popleft(), 0.0)
    decode.on_message(Cancel(room=room, incarnation=Incarnation(1)), 0.0)
    assert not decode.is_idle()
    assert reason_of(world, room) == "has nothing more to say of the request: the request was cancelled"


def test_another_start_of_the_replica_is_not_answered_for() -> None:
    world = quiet_world()
    assert answers(world, Room(7), incarnation=2) == []
    assert world.leaders["decode/0"].load().dropped == {"Inquire": 1}


def test_leaders_ask_again_and_again_whether_a_router_still_wants_what_they_have() -> None:
    world = quiet_world()
    room = world.submit(PROMPT, 40)
    for address in ("prefill/0", "decode/0"):
        leader = world.leaders[address]
        submit = world.queues[ROUTER, address].popleft()
        assert isinstance(submit, Submit)
        leader.on_message(submit, 0.0)
        leader.on_message(replace(submit, room=Room(9), router=replace(ME, address="another")), 0.0)
        for now_s in (0.0, INQUIRE_EVERY_S - 1, INQUIRE_EVERY_S):
            leader.outgoing = []
            leader.tick(now_s)
            told = [(to, message.rooms) for to, message in leader.outgoing if isinstance(message, Inquire)]
            expected = [] if now_s == INQUIRE_EVERY_S - 1 else [(ROUTER, [room]), ("another", [Room(9)])]
            assert told == expected


def test_a_request_whose_cancel_was_lost_ends_on_both_sides() -> None:
    world = quiet_world()
    room = world.submit(PROMPT, 1000)
    world.queues[ROUTER, "decode/0"].clear()
    world.clients[room].cancelled = True
    world.run()
    check(world, 40)
