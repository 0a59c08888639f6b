"""What the leaders do when a router, a replica or the proof that pages are free is lost."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import ROUTER, Incarnation
from cluster.spec.messages import Cancel, Submit, TableUpdate
from cluster.spec.registry import PageFilter, TransferMode
from cluster.spec.step_messages import ForgetPeer
from cluster.spec.transfer_messages import Refused, Ticket
from tests.fakes.handoff import World
from tests.fakes.handoff_checks import PROMPT, check, quiet_world
from tests.fakes.kinds import all_of
from tests.fakes.paged_ranks import PAGE_SIZE


@given(seed=st.integers(0, 2**32), moment=st.integers(0, 120), num_requests=st.integers(1, 5))
def test_requests_of_a_lost_router_are_given_up(seed: int, moment: int, num_requests: int) -> None:
    world = World(
        seed=seed,
        cp=2,
        mode=TransferMode.ALL_RANKS,
        page_filter=PageFilter.MODULAR,
        num_pages=60,
        chunk_tokens=8,
    )
    for number in range(num_requests):
        world.submit([number, *PROMPT], 40)
    for _ in range(moment):
        world.act()
    world.lose_router()
    world.run()
    check(world, 60)


def test_pages_come_back_when_router_and_prefill_are_both_proven_gone() -> None:
    world = quiet_world()
    world.submit(PROMPT, 4)
    decode = world.leaders["decode/0"]
    decode.on_message(world.queues[ROUTER, "decode/0"].popleft(), 0.0)
    reaped = {ROUTER: Incarnation(1)}
    decode.on_message(TableUpdate(snapshot=msgspec.structs.replace(world.table(), reaped=reaped)), 0.0)
    assert not decode.is_idle(), "prefill has a ticket and may write"
    reaped[world.prefill_peer.replica] = Incarnation(1)
    decode.on_message(TableUpdate(snapshot=msgspec.structs.replace(world.table(), reaped=reaped)), 0.0)
    decode.tick(1.0)
    assert decode.is_idle()
    decode.check_integrity()


def test_ranks_hear_once_of_a_decode_replica_that_is_gone() -> None:
    world = quiet_world()
    prefill = world.leaders["prefill/0"]
    for _ in range(2):
        reaped = {world.decode_peer.replica: Incarnation(1)}
        prefill.on_message(TableUpdate(snapshot=msgspec.structs.replace(world.table(), reaped=reaped)), 0.0)
    told = [message for _, message in prefill.outgoing if isinstance(message, ForgetPeer)]
    assert told == [ForgetPeer(replica=world.decode_peer.replica, incarnation=Incarnation(1))] * world.cp


def test_too_much_quarantine_ends_the_replica_when_nothing_else_is_at_hand() -> None:
    """Prefill never answers the Revoke: time alone frees nothing, but in the end there are new pages elsewhere.

    That is, beyond the half second in which bytes settle here.
    """
    world = quiet_world(num_pages=10)
    decode = world.leaders["decode/0"]
    for _ in range(2):
        world.submit([1] * 3 * PAGE_SIZE, 4)
    submits = all_of(Submit, world.queues[ROUTER, "decode/0"])
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
        "6 of 10 pages are in quarantine, more than 0.25 of them: prefill-0 did not say that it writes no more"
    )


@pytest.mark.parametrize(
    ("cancelled_pages", "reason"),
    [
        (3, "3 of 10 pages are in quarantine, more than 0.25 of them: "),
        (2, "2 of 10 pages are in quarantine, which a request waits for: "),
    ],
)
def test_requests_that_wait_for_pages_in_quarantine_do_not_keep_the_replica(cancelled_pages: int, reason: str) -> None:
    world = quiet_world(num_pages=10)
    decode = world.leaders["decode/0"]
    world.submit([1] * cancelled_pages * PAGE_SIZE, 4)
    world.submit([1] * 9 * PAGE_SIZE, 4)
    first, second = all_of(Submit, world.queues[ROUTER, "decode/0"])
    decode.on_message(first, 0.0)
    decode.on_message(second, 0.0)
    decode.on_message(Cancel(room=first.room, incarnation=Incarnation(1)), 0.0)
    decode.tick(60.0)
    assert (decode.load().num_waiting, decode.must_end) == (1, "")
    decode.tick(60.5)
    assert decode.must_end.startswith(reason)


def test_pages_that_are_proven_free_in_time_let_the_replica_take_requests_again() -> None:
    world = quiet_world(num_pages=10)
    decode = world.leaders["decode/0"]
    for _ in range(2):
        world.submit([1] * 3 * PAGE_SIZE, 4)
    first, second = all_of(Submit, world.queues[ROUTER, "decode/0"])
    decode.on_message(first, 0.0)
    decode.on_message(second, 0.0)
    decode.on_message(Cancel(room=first.room, incarnation=Incarnation(1)), 0.0)
    decode.tick(60.5)
    assert decode.load().draining
    reaped = {world.prefill_peer.replica: Incarnation(1)}
    decode.on_message(TableUpdate(snapshot=msgspec.structs.replace(world.table(), reaped=reaped)), 61.0)
    decode.tick(62.0)
    assert (decode.load().quarantined_pages, decode.load().draining, decode.must_end) == (0, False, "")
    assert decode.load().stopping_pages == 0


def test_a_request_whose_router_is_lost_is_not_decoded_to_its_end() -> None:
    world = quiet_world(num_pages=300)
    room = world.submit(PROMPT, 1000)
    while len(world.clients[room].tokens) < 3:
        world.act()
    world.lose_router()
    world.run()
    check(world, 300)
    assert len(world.clients[room].tokens) < 100


def test_a_ticket_whose_request_was_lost_says_whose_message_was_awaited_and_how_long() -> None:
    world = quiet_world(num_pages=10)
    prefill, decode = world.leaders["prefill/0"], world.leaders["decode/0"]
    world.submit([1] * 3 * PAGE_SIZE, 4)
    decode.on_message(world.queues[ROUTER, "decode/0"][0], 0.0)
    (ticket,) = [message for _, message in decode.outgoing if isinstance(message, Ticket)]
    prefill.on_message(ticket, 0.0)
    prefill.tick(30.0)
    (refused,) = [message for _, message in prefill.outgoing if isinstance(message, Refused)]
    assert refused.reason == "the router's message with the request itself did not come within 30 s"
