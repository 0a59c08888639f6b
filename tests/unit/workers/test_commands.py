"""A leader does once what an administrator wants, however often it hears of it, and always answers."""

import pytest

from cluster.spec.ids import ROUTER, Incarnation, Peer, Role
from cluster.spec.kv import page_keys
from cluster.spec.messages import Command, CommandResult, Drain, Resume, Wanted
from cluster.spec.tiers import PinPages, UseStorage
from tests.fakes.leader_pair import LeaderPair
from tests.fakes.tier_world import PAGE_SIZE, TierWorld
from tests.unit.workers.test_tiers import world_of
from workers.scheduler.leader import Leader


def command(number: int, wanted: Wanted, *, of: int = 1, router: int = 1) -> Command:
    sender = Peer(replica=ROUTER, incarnation=Incarnation(router), address=ROUTER)
    return Command(number=number, sender=sender, incarnation=Incarnation(of), wanted=wanted)


def told(pair: LeaderPair, role: Role, *commands: Command) -> tuple[bool, list[int]]:
    """Whether the replica drains then, and the numbers of its answers."""
    answers = answers_of(pair.leaders[role], *commands)
    assert {(answer.replica, answer.incarnation) for answer in answers} <= {(f"{role}-0", 1)}
    return pair.leaders[role].load().draining, [answer.number for answer in answers]


@pytest.mark.parametrize("role", Role)
def test_a_late_copy_of_an_earlier_command_is_answered_and_changes_nothing(role: Role) -> None:
    drain, resume = command(1, Drain()), command(2, Resume())
    assert told(LeaderPair(), role, drain, drain) == (True, [1, 1])
    assert told(LeaderPair(), role, drain, resume, drain) == (False, [1, 2, 1])


@pytest.mark.parametrize("role", Role)
def test_each_start_of_a_router_counts_for_itself(role: Role) -> None:
    assert told(LeaderPair(), role, command(7, Resume()), command(1, Drain(), router=2)) == (True, [7, 1])


@pytest.mark.parametrize("role", Role)
def test_what_was_meant_for_another_start_is_dropped(role: Role) -> None:
    pair = LeaderPair()
    assert told(pair, role, command(1, Drain(), of=2)) == (False, [])
    assert pair.leaders[role].load().dropped == {"Command": 1}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("wanted", [PinPages(keys=[b"page"], is_pinned=True), UseStorage(is_attached=True)], ids=str)
def test_what_is_not_configured_is_refused(role: Role, wanted: Wanted) -> None:
    (answer,) = answers_of(LeaderPair().leaders[role], command(1, wanted))
    assert answer.refusal == "no host memory is configured for cached pages (hicache.host_gib)"


def tiered_leader(host_pages: int, backend: str) -> tuple[Leader, TierWorld]:
    """A leader over the tiers of a world."""
    world = world_of(backend=backend, device_pages=64, host_pages=host_pages)
    leader = LeaderPair().prefill
    leader.tiers = world.tiers
    return leader, world


def answers_of(leader: Leader, *commands: Command) -> list[CommandResult]:
    leader.outgoing = []
    for given in commands:
        leader.on_message(given, 0.0)
    return [message for to, message in leader.outgoing if to == ROUTER and isinstance(message, CommandResult)]


def test_a_leader_pins_and_says_how_many_pages_it_keeps() -> None:
    leader, world = tiered_leader(host_pages=8, backend="none")
    keys = page_keys([0] * 8, PAGE_SIZE)
    pin, unpin = (PinPages(keys=keys, is_pinned=is_pinned) for is_pinned in (True, False))
    (answer,) = answers_of(leader, command(1, pin))
    assert (answer.refusal, answer.num_pinned) == ("", 0)
    world.submit([0] * 8)
    world.drain()
    assert [answer.num_pinned for answer in answers_of(leader, command(1, pin), command(2, unpin))] == [4, 0]
    assert world.tiers.state().num_pinned == 0
    wide = PinPages(keys=page_keys([0] * 10, PAGE_SIZE), is_pinned=True)
    (answer,) = answers_of(leader, command(3, wide))
    assert answer.refusal == "5 of 8 host pages would be pinned, 0 are; allowed: 4"
    assert not world.tiers.host.pins


def test_a_leader_leaves_storage_alone_and_uses_it_again() -> None:
    leader, world = tiered_leader(host_pages=8, backend="files")
    for number, is_attached in enumerate((False, True), start=1):
        (answer,) = answers_of(leader, command(number, UseStorage(is_attached=is_attached)))
        assert not answer.refusal
        assert world.tiers.state().is_attached is is_attached
    without, _ = tiered_leader(host_pages=8, backend="none")
    (answer,) = answers_of(without, command(1, UseStorage(is_attached=False)))
    assert answer.refusal == "no storage is configured (hicache.storage.backend)"
