"""A leader does once what an administrator wants, however often it hears of it, and always answers."""

import pytest

from cluster.spec.ids import ROUTER, Incarnation
from cluster.spec.messages import Command, CommandTaken, Drain, Resume, Wanted
from cluster.spec.peer import Peer
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import quiet_world

ME = Peer(replica=ROUTER, incarnation=Incarnation(1), address=ROUTER)


def command(number: int, wanted: Wanted, *, of: int = 1, router: int = 1) -> Command:
    sender = Peer(replica=ROUTER, incarnation=Incarnation(router), address=ROUTER)
    return Command(number=number, sender=sender, incarnation=Incarnation(of), wanted=wanted)


def told(world: World, address: str, *commands: Command) -> tuple[bool, list[int]]:
    """Whether the replica drains then, and the numbers of its answers."""
    leader = world.leaders[address]
    leader.outgoing = []
    for given in commands:
        leader.on_message(given, 0.0)
    answers = [message for to, message in leader.outgoing if to == ROUTER and isinstance(message, CommandTaken)]
    assert {(answer.replica, answer.incarnation) for answer in answers} <= {(address.replace("/", "-"), 1)}
    return leader.load().draining, [answer.number for answer in answers]


@pytest.mark.parametrize("address", ["prefill/0", "decode/0"])
def test_a_late_copy_of_an_earlier_command_is_answered_and_changes_nothing(address: str) -> None:
    drain, resume = command(1, Drain()), command(2, Resume())
    assert told(quiet_world(), address, drain, drain) == (True, [1, 1])
    assert told(quiet_world(), address, drain, resume, drain) == (False, [1, 2, 1])


@pytest.mark.parametrize("address", ["prefill/0", "decode/0"])
def test_each_start_of_a_router_counts_for_itself(address: str) -> None:
    assert told(quiet_world(), address, command(7, Resume()), command(1, Drain(), router=2)) == (True, [7, 1])


@pytest.mark.parametrize("address", ["prefill/0", "decode/0"])
def test_what_was_meant_for_another_start_is_dropped(address: str) -> None:
    world = quiet_world()
    assert told(world, address, command(1, Drain(), of=2)) == (False, [])
    assert world.leaders[address].load().dropped == {"Command": 1}
