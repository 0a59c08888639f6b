"""What the leaders do when a router, a replica or the proof that pages are free is lost."""

import pytest

from cluster.spec.ids import ROUTER, Incarnation, Role
from cluster.spec.messages import Cancel
from cluster.spec.step_messages import ForgetPeer
from cluster.spec.transfer_messages import Refused, Ticket
from tests.fakes.leader_pair import PROMPT, LeaderPair
from tests.fakes.paged_ranks import PAGE_SIZE


def test_pages_come_back_when_router_and_prefill_are_both_proven_gone() -> None:
    pair = LeaderPair()
    decode = pair.decode
    pair.tell(Role.DECODE, pair.submit(PROMPT))
    reaped = {ROUTER: Incarnation(1)}
    decode.on_message(pair.table(reaped), 0.0)
    assert not decode.is_idle(), "prefill has a ticket and may write"
    reaped[pair.prefill_peer.replica] = Incarnation(1)
    decode.on_message(pair.table(reaped), 0.0)
    decode.tick(1.0)
    assert decode.is_idle()
    decode.check_integrity()


def test_ranks_hear_once_of_a_decode_replica_that_is_gone() -> None:
    pair = LeaderPair()
    prefill = pair.prefill
    for _ in range(2):
        reaped = {pair.decode_peer.replica: Incarnation(1)}
        prefill.on_message(pair.table(reaped), 0.0)
    told = [message for _, message in prefill.outgoing if isinstance(message, ForgetPeer)]
    assert told == [ForgetPeer(replica=pair.decode_peer.replica, incarnation=Incarnation(1))] * 2


def test_too_much_quarantine_ends_the_replica_when_nothing_else_is_at_hand() -> None:
    """Prefill never answers the Revoke: time alone frees nothing, but in the end there are new pages elsewhere.

    That is, beyond the half second in which bytes settle here.
    """
    pair = LeaderPair(num_pages=10)
    decode = pair.decode
    submits = [pair.submit([1] * 3 * PAGE_SIZE) for _ in range(2)]
    for submit in submits:
        decode.on_message(submit, 0.0)
    decode.on_message(Cancel(room=submits[0].room, incarnation=Incarnation(1)), 0.0)
    assert decode.load().stopping_pages == 3
    decode.tick(60.0)
    assert (decode.load().quarantined_pages, decode.load().draining) == (0, False)
    decode.tick(60.5)
    assert (decode.load().quarantined_pages, decode.load().draining, decode.must_end) == (3, True, "")
    assert decode.load().stopping_pages == 3
    decode.on_message(Cancel(room=submits[1].room, incarnation=Incarnation(1)), 60.5)
    decode.tick(61.0)
    assert decode.must_end == ""
    decode.tick(121.0)
    assert decode.must_end == (
        "6 of 10 pages are in quarantine, more than 0.25 of them: prefill-0 did not confirm that it will write no more"
    )


@pytest.mark.parametrize(
    ("cancelled_pages", "reason"),
    [
        (3, "3 of 10 pages are in quarantine, more than 0.25 of them: "),
        (2, "2 of 10 pages are in quarantine, which a request waits for: "),
    ],
)
def test_requests_that_wait_for_pages_in_quarantine_do_not_keep_the_replica(cancelled_pages: int, reason: str) -> None:
    pair = LeaderPair(num_pages=10)
    decode = pair.decode
    first, second = pair.submit([1] * cancelled_pages * PAGE_SIZE), pair.submit([1] * 9 * PAGE_SIZE)
    decode.on_message(first, 0.0)
    decode.on_message(second, 0.0)
    decode.on_message(Cancel(room=first.room, incarnation=Incarnation(1)), 0.0)
    decode.tick(60.0)
    assert (decode.load().num_waiting, decode.must_end) == (1, "")
    decode.tick(60.5)
    assert decode.must_end.startswith(reason)


def test_pages_that_are_proven_free_in_time_let_the_replica_take_requests_again() -> None:
    pair = LeaderPair(num_pages=10)
    decode = pair.decode
    first, second = (pair.submit([1] * 3 * PAGE_SIZE) for _ in range(2))
    decode.on_message(first, 0.0)
    decode.on_message(second, 0.0)
    decode.on_message(Cancel(room=first.room, incarnation=Incarnation(1)), 0.0)
    decode.tick(60.5)
    assert decode.load().draining
    reaped = {pair.prefill_peer.replica: Incarnation(1)}
    decode.on_message(pair.table(reaped), 61.0)
    decode.tick(62.0)
    assert (decode.load().quarantined_pages, decode.load().draining, decode.must_end) == (0, False, "")
    assert decode.load().stopping_pages == 0


def test_a_ticket_whose_request_was_lost_says_whose_message_was_awaited_and_how_long() -> None:
    pair = LeaderPair(num_pages=10)
    prefill = pair.prefill
    (ticket,) = [said for said in pair.tell(Role.DECODE, pair.submit(PROMPT)) if isinstance(said, Ticket)]
    prefill.on_message(ticket, 0.0)
    prefill.tick(30.0)
    (refused,) = [message for _, message in prefill.outgoing if isinstance(message, Refused)]
    assert refused.reason == "the router's message with the request itself did not come within 30 s"
