"""What leaders answer to a router that has heard nothing, and what they ask themselves."""

from msgspec.structs import replace

from cluster.spec.ids import Incarnation, Role, Room
from cluster.spec.messages import INQUIRE_EVERY_S, Blame, Cancel, Failure, Inquire, Message
from tests.fakes.leader_pair import ME, PROMPT, LeaderPair


def answers(pair: LeaderPair, *rooms: Room, incarnation: int = 1) -> list[Message]:
    """Return what decode says when it is asked about these."""
    inquire = Inquire(rooms=list(rooms), sender=ME, incarnation=Incarnation(incarnation))
    return pair.tell(Role.DECODE, inquire)


def reason_of(pair: LeaderPair, room: Room) -> str:
    (failure,) = answers(pair, room)
    assert isinstance(failure, Failure)
    assert (failure.room, failure.retryable, failure.blame) == (room, True, Blame.NEITHER)
    return failure.reason


def test_a_request_that_never_came_need_not_come_any_more() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    assert reason_of(pair, submit.room) == "has nothing more to report about the request: it never came"
    pair.tell(Role.DECODE, submit)
    assert pair.decode.is_idle()


def test_nothing_is_said_of_a_request_in_work() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    pair.tell(Role.DECODE, submit)
    assert answers(pair, submit.room) == []


def test_a_request_whose_pages_are_still_waited_for_is_over() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    pair.tell(Role.DECODE, submit, Cancel(room=submit.room, incarnation=Incarnation(1)))
    assert not pair.decode.is_idle()
    assert reason_of(pair, submit.room) == "has nothing more to report about the request: the request was cancelled"


def test_another_start_of_the_replica_is_not_answered_for() -> None:
    pair = LeaderPair()
    assert answers(pair, Room(7), incarnation=2) == []
    assert pair.decode.load().dropped == {"Inquire": 1}


def test_leaders_ask_again_and_again_whether_a_router_still_wants_what_they_have() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    other = replace(submit, room=Room(9), router=replace(ME, address="another"))
    for role, leader in pair.leaders.items():
        pair.tell(role, submit, other)
        for now_s in (0.0, INQUIRE_EVERY_S - 1, INQUIRE_EVERY_S):
            leader.outgoing = []
            leader.tick(now_s)
            told = [(to, message.rooms) for to, message in leader.outgoing if isinstance(message, Inquire)]
            expected = [] if now_s == INQUIRE_EVERY_S - 1 else [(ME.address, [submit.room]), ("another", [Room(9)])]
            assert told == expected


def test_a_choice_does_not_wait_for_ever_for_one_that_never_comes() -> None:
    pair = LeaderPair()
    choice = pair.submit(PROMPT, prompt_of=Room(77))
    pair.tell(Role.DECODE, choice)
    assert not pair.decode.is_idle()
    inquire = Inquire(rooms=[choice.room], sender=ME, incarnation=Incarnation(1))
    failures = [said for said in pair.tell(Role.DECODE, inquire) if isinstance(said, Failure)]
    assert any("the choice that was to bring its prompt ended: it never came" in said.reason for said in failures)
    assert {said.blame for said in failures} == {Blame.NEITHER}
    assert pair.decode.is_idle()


def test_choices_fail_with_the_one_that_was_to_bring_the_prompt() -> None:
    pair = LeaderPair()
    first = pair.submit(PROMPT)
    second = pair.submit(PROMPT, prompt_of=first.room)
    pair.tell(Role.DECODE, first, second)
    (failure,) = (
        said
        for said in pair.tell(Role.DECODE, Cancel(room=first.room, incarnation=Incarnation(1)))
        if isinstance(said, Failure)
    )
    assert failure.room == second.room
    assert failure.reason == "the choice that was to bring its prompt ended: the request was cancelled"
