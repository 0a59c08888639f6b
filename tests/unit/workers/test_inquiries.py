"""Inquiries, commands and unexpected messages to leaders."""

import pytest
from msgspec.structs import replace

from cluster.spec.ids import ROUTER, Incarnation, Peer, ReplicaId, Role, Room
from cluster.spec.kv import page_keys
from cluster.spec.messages import (
    INQUIRE_EVERY_S,
    Blame,
    Cancel,
    Command,
    CommandResult,
    Drain,
    Failure,
    Inquire,
    Message,
    Resume,
    Wanted,
)
from cluster.spec.step_messages import CancelSend, SendReport
from cluster.spec.tiers import PinPages, UseStorage
from cluster.spec.transfer_messages import Drained, Revoke, SendState, Ticket
from tests.fakes.leader_pair import ME, PROMPT, LeaderPair
from tests.fakes.tier_world import PAGE_SIZE, TierWorld
from tests.unit.workers.test_tiers import world_of
from workers.scheduler.leader import DpLeader


def answers(pair: LeaderPair, *rooms: Room, incarnation: int = 1) -> list[Message]:
    """Return decode's reply to an inquiry about these rooms."""
    inquire = Inquire(rooms=list(rooms), sender=ME, incarnation=Incarnation(incarnation))
    return pair.deliver(Role.DECODE, inquire)


def reason_of(pair: LeaderPair, room: Room) -> str:
    (failure,) = answers(pair, room)
    assert isinstance(failure, Failure)
    assert (failure.room, failure.retryable, failure.blame) == (room, True, Blame.NEITHER)
    return failure.reason


def test_a_cancel_before_its_submit_drops_the_submit() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    assert reason_of(pair, submit.room) == "will report nothing more about the request: the request never arrived"
    pair.deliver(Role.DECODE, submit)
    assert pair.decode.is_idle()


def test_a_running_request_gets_no_reply() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    pair.deliver(Role.DECODE, submit)
    assert answers(pair, submit.room) == []


def test_a_request_that_still_awaits_its_pages_is_over() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    pair.deliver(Role.DECODE, submit)
    pair.deliver(Role.DECODE, Cancel(room=submit.room, incarnation=Incarnation(1)))
    assert not pair.decode.is_idle()
    assert reason_of(pair, submit.room) == "will report nothing more about the request: the request was cancelled"


def test_inquiries_for_another_incarnation_are_not_answered() -> None:
    pair = LeaderPair()
    assert answers(pair, Room(7), incarnation=2) == []
    assert pair.decode.load().dropped == {"Inquire": 1}


def test_leaders_inquire_periodically_about_their_requests() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    other = replace(submit, room=Room(9), router=replace(ME, address="another"))
    for leader in pair.leaders.values():
        for message in (submit, other):
            leader.on_message(message, 0.0)
        for now_s in (0.0, INQUIRE_EVERY_S - 1, INQUIRE_EVERY_S):
            leader.outgoing = []
            leader.tick(now_s)
            reported = [(to, message.rooms) for to, message in leader.outgoing if isinstance(message, Inquire)]
            expected = [] if now_s == INQUIRE_EVERY_S - 1 else [(ME.address, [submit.room]), ("another", [Room(9)])]
            assert reported == expected


def test_a_choice_waits_for_a_missing_first_choice_for_a_limited_time() -> None:
    pair = LeaderPair()
    choice = pair.submit(PROMPT, prompt_of=Room(77))
    pair.deliver(Role.DECODE, choice)
    assert not pair.decode.is_idle()
    inquire = Inquire(rooms=[choice.room], sender=ME, incarnation=Incarnation(1))
    failures = [said for said in pair.deliver(Role.DECODE, inquire) if isinstance(said, Failure)]
    assert any("shares its prompt with this one, ended: the request never arrived" in said.reason for said in failures)
    assert {said.blame for said in failures} == {Blame.NEITHER}
    assert pair.decode.is_idle()


def test_choices_fail_with_the_one_that_was_to_bring_the_prompt() -> None:
    pair = LeaderPair()
    first = pair.submit(PROMPT)
    second = pair.submit(PROMPT, prompt_of=first.room)
    pair.deliver(Role.DECODE, first, second)
    (failure,) = (
        said
        for said in pair.deliver(Role.DECODE, Cancel(room=first.room, incarnation=Incarnation(1)))
        if isinstance(said, Failure)
    )
    assert failure.room == second.room
    assert failure.reason == "the first choice, which shares its prompt with this one, ended: the request was cancelled"


def command(number: int, wanted: Wanted, *, of: int = 1, router: int = 1) -> Command:
    sender = Peer(replica=ROUTER, incarnation=Incarnation(router), address=ROUTER)
    return Command(number=number, sender=sender, incarnation=Incarnation(of), wanted=wanted)


def reported(pair: LeaderPair, role: Role, *commands: Command) -> tuple[bool, list[int]]:
    """Return whether the replica drains afterwards, and the numbers of its replies."""
    answers = answers_of(pair.leaders[role], *commands)
    assert {(answer.replica, answer.incarnation) for answer in answers} <= {(f"{role}-0", 1)}
    return pair.leaders[role].load().draining, [answer.number for answer in answers]


@pytest.mark.parametrize("role", Role)
def test_a_late_copy_of_an_earlier_command_is_answered_and_changes_nothing(role: Role) -> None:
    drain, resume = command(1, Drain()), command(2, Resume())
    assert reported(LeaderPair(), role, drain, drain) == (True, [1, 1])
    assert reported(LeaderPair(), role, drain, resume, drain) == (False, [1, 2, 1])


@pytest.mark.parametrize("role", Role)
def test_each_start_of_a_router_counts_for_itself(role: Role) -> None:
    assert reported(LeaderPair(), role, command(7, Resume()), command(1, Drain(), router=2)) == (True, [7, 1])


@pytest.mark.parametrize("role", Role)
def test_messages_for_another_start_are_dropped(role: Role) -> None:
    pair = LeaderPair()
    assert reported(pair, role, command(1, Drain(), of=2)) == (False, [])
    assert pair.leaders[role].load().dropped == {"Command": 1}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("wanted", [PinPages(keys=[b"page"], is_pinned=True), UseStorage(is_attached=True)], ids=str)
def test_commands_for_missing_tiers_are_refused(role: Role, wanted: Wanted) -> None:
    (answer,) = answers_of(LeaderPair().leaders[role], command(1, wanted))
    assert answer.refusal == "no host memory is configured for cached pages (hicache.host_gib)"


def tiered_leader(host_pages: int, backend: str) -> tuple[DpLeader, TierWorld]:
    """Return a leader over the tiers of a world."""
    world = world_of(backend=backend, device_pages=64, host_pages=host_pages)
    leader = LeaderPair().prefill
    leader.tiers = world.tiers
    return leader, world


def answers_of(leader: DpLeader, *commands: Command) -> list[CommandResult]:
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
    assert answer.refusal == "5 of 8 host pages would be pinned, up from 0; allowed: at most 4"
    assert not world.tiers.host.pins


def test_a_leader_detaches_storage_and_attaches_it_again() -> None:
    leader, world = tiered_leader(host_pages=8, backend="files")
    for number, is_attached in enumerate((False, True), start=1):
        (answer,) = answers_of(leader, command(number, UseStorage(is_attached=is_attached)))
        assert not answer.refusal
        assert world.tiers.state().is_attached is is_attached
    without, _ = tiered_leader(host_pages=8, backend="none")
    (answer,) = answers_of(without, command(1, UseStorage(is_attached=False)))
    assert answer.refusal == "no storage is configured (hicache.storage.backend)"


EARLIER = Incarnation(0)


def pair_with_ticket() -> tuple[LeaderPair, Ticket]:
    """Return a pair in which prefill has the request and decode's ticket is in flight."""
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    pair.deliver(Role.PREFILL, submit)
    (ticket,) = (said for said in pair.deliver(Role.DECODE, submit) if isinstance(said, Ticket))
    return pair, ticket


def revoke_of(ticket: Ticket) -> Revoke:
    return Revoke(
        room=ticket.room,
        decode=ticket.decode,
        prefill_incarnation=ticket.prefill_incarnation,
    )


def foreign(ticket: Ticket) -> dict[str, Message]:
    revoke = revoke_of(ticket)
    others = {
        "another replica": replace(ticket.decode, replica=ReplicaId("decode-7"), address="decode/7"),
        "an earlier start": replace(ticket.decode, incarnation=EARLIER),
    }
    return {
        **{f"ticket of {name}": replace(ticket, decode=other) for name, other in others.items()},
        **{f"revoke of {name}": replace(revoke, decode=other) for name, other in others.items()},
        "ticket for an earlier start": replace(ticket, prefill_incarnation=EARLIER),
        "revoke for an earlier start": replace(revoke, prefill_incarnation=EARLIER),
        "cancel for an earlier start": Cancel(room=ticket.room, incarnation=EARLIER),
    }


@pytest.mark.parametrize("has_ticket", [False, True])
@pytest.mark.parametrize("name", foreign(pair_with_ticket()[1]))
def test_a_foreign_message_is_dropped_and_counted(name: str, *, has_ticket: bool) -> None:
    pair, ticket = pair_with_ticket()
    if has_ticket:
        pair.deliver(Role.PREFILL, ticket)
    message = foreign(ticket)[name]
    assert pair.deliver(Role.PREFILL, message, message) == []
    assert pair.prefill.load().dropped == {type(message).__name__: 2}
    pair.deliver(Role.PREFILL, ticket)
    plan = pair.prefill.next_plan()
    assert plan is not None
    assert [new.room for new in plan.new_requests] == [ticket.room]


def test_every_revoke_asks_the_ranks_again() -> None:
    """The message to a rank, or the rank's report, may have been lost."""
    pair, ticket = pair_with_ticket()
    pair.deliver(Role.PREFILL, ticket)
    reports = [SendReport(room=ticket.room, sender_rank=rank, state=SendState.DRAINED) for rank in range(2)]
    asked = [CancelSend(room=ticket.room)] * 2
    assert pair.deliver(Role.PREFILL, revoke_of(ticket)) == asked
    assert pair.deliver(Role.PREFILL, reports[0]) == []
    assert pair.deliver(Role.PREFILL, revoke_of(ticket)) == asked
    assert [type(said) for said in pair.deliver(Role.PREFILL, *reports)] == [Drained]
    assert pair.prefill.is_idle()


def test_an_early_foreign_ticket_is_dropped_with_the_request() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    (ticket,) = (said for said in pair.deliver(Role.DECODE, submit) if isinstance(said, Ticket))
    pair.deliver(Role.PREFILL, foreign(ticket)["ticket of another replica"])
    assert pair.prefill.load().dropped == {}
    pair.deliver(Role.PREFILL, submit)
    assert pair.prefill.load().dropped == {"Ticket": 1}


def test_decode_counts_duplicates_and_messages_of_other_tickets() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    late = Drained(room=submit.room, prefill=pair.prefill_peer, decode_incarnation=Incarnation(7))
    pair.deliver(Role.DECODE, submit, submit, late, late)
    assert pair.decode.load().dropped == {"Submit": 1, "Drained": 2}
