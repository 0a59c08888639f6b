"""Inquiries by the router about silent attempts, and its replies to leaders' inquiries."""

import msgspec

from cluster.spec.ids import Incarnation, Room
from cluster.spec.messages import INQUIRE_EVERY_S, Blame, Inquire
from router.request import Action, SendMessage, WakeAt
from tests.fakes.bootstrap import peer_of
from tests.fakes.dispatching import DECODE, ME, NOW, PREFILL, ask, cancel, failure, make, on, opened, output, started_of

DUE = NOW + INQUIRE_EVERY_S


def asked(*rooms: int) -> list[Action]:
    inquire = Inquire(rooms=[*map(Room, rooms)], sender=ME, incarnation=DECODE.incarnation)
    return [SendMessage(address=DECODE.address, message=inquire)]


def test_decode_gets_inquiries_about_silent_requests_until_it_responds() -> None:
    dispatch = make()
    first, actions = dispatch.open(ask(), 100.0, NOW)
    assert actions[-1] == WakeAt(time_s=DUE)
    second = opened(dispatch)
    assert dispatch.next_deadline_s == DUE
    assert dispatch.expire(DUE - 0.1) == []
    assert dispatch.expire(DUE) == asked(first, second)
    dispatch.on_output(output(second, 0, 9), DUE + 1.0)
    assert dispatch.expire(DUE + INQUIRE_EVERY_S) == asked(first)
    assert dispatch.expire(DUE + 2 * INQUIRE_EVERY_S) == asked(first, second)


def test_a_request_that_has_just_begun_is_not_asked_about() -> None:
    dispatch = make()
    first = opened(dispatch)
    _, actions = dispatch.open(ask(), 100.0, DUE - 1.0)
    assert not any(isinstance(action, WakeAt) for action in actions)
    assert dispatch.expire(DUE) == asked(first)


def test_the_time_restarts_with_the_next_attempt() -> None:
    dispatch = make()
    dispatch.on_client_left(opened(dispatch))
    assert dispatch.next_deadline_s is None
    _, actions = dispatch.open(ask(), 1000.0, 500.0)
    assert actions[-1] == WakeAt(time_s=500.0 + INQUIRE_EVERY_S)


def test_requests_unknown_to_decode_continue_on_any_pair() -> None:
    dispatch = make(max_retries=1)
    room = opened(dispatch)
    dispatch.on_output(output(room, 0, 9), NOW)
    actions = dispatch.on_failure(msgspec.structs.replace(failure(room, DECODE), blame=Blame.NEITHER), DUE)
    submit = started_of(actions)
    assert ([*submit.prompt_ids], submit.num_given) == ([1, 2, 3, 9], 1)
    assert dispatch.breakers.allows(DECODE, DUE)


def test_an_attempt_that_decode_never_names_moves_to_another_pair() -> None:
    other = peer_of("decode-1")
    dispatch = make(on(), on(), on(other), max_retries=1, max_unanswered=3)
    known, lost = opened(dispatch, 1000.0), opened(dispatch, 1000.0)
    sign = Inquire(rooms=[Room(known)], sender=DECODE, incarnation=ME.incarnation)
    now_s = NOW
    for _ in range(3):
        now_s += INQUIRE_EVERY_S
        assert dispatch.expire(now_s) == asked(known, lost)
        assert dispatch.on_inquire(sign) == []
    moved = dispatch.expire(now_s + 60.0)  # a stall of the router counts as one more inquiry
    assert moved[:2] == [cancel(lost, PREFILL), cancel(lost, DECODE)]
    assert started_of(moved).decode == other
    assert dispatch.is_under_way(Room(known))


def test_a_leader_gets_repeated_cancels_for_ended_requests() -> None:
    dispatch = make()
    left, open_ = opened(dispatch), opened(dispatch)
    dispatch.on_client_left(left)
    inquire = Inquire(rooms=[Room(left), Room(open_), Room(77)], sender=PREFILL, incarnation=ME.incarnation)
    assert dispatch.on_inquire(inquire) == [cancel(left, PREFILL), cancel(Room(77), PREFILL)]
    assert dispatch.is_open(open_)


def test_inquiries_to_an_earlier_router_get_no_reply() -> None:
    dispatch = make()
    inquire = Inquire(rooms=[Room(1)], sender=PREFILL, incarnation=Incarnation(ME.incarnation + 1))
    assert dispatch.on_inquire(inquire) == []
    assert dispatch.dropped == {"foreign": 1}
