"""A receiver session is ready only when all reports agree, and frees pages only when nobody can still write to them."""

import msgspec
import pytest

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.phases import PromptTimes
from cluster.spec.registry import Verify
from cluster.spec.transfer_messages import Accepted, Done, Drained, PageDigests, Refused, Result, Revoke
from tests.unit.transfer.samples import DECODE, PREFILL, ROOM, ticket
from transfer.receiver import (
    REVOKE_AGAIN_S,
    TICKET_AGAIN_S,
    FailureKind,
    ReceiverSession,
    ReceiverState,
)

FromPrefill = Result | Done | Refused | Drained

SILENCE_S = 100.0
SETTLE_S = 5.0


def _session(*, is_open: bool = True) -> ReceiverSession:
    session = ReceiverSession(
        ticket([4, 5, 6]), PREFILL, num_pages=3, num_bytes=30, num_ranks=1, silence_s=SILENCE_S, settle_s=SETTLE_S
    )
    if is_open:
        assert session.open(0.0) == session.ticket
    return session


def _result(num_pages: int = 3, num_bytes: int = 30, token: int = 9) -> Result:
    return Result(
        room=ROOM,
        prefill=PREFILL,
        decode_incarnation=DECODE.incarnation,
        token_ids=[token],
        senders=[0, 1],
        num_pages=num_pages,
        num_bytes=num_bytes,
        times=PromptTimes(replica=PREFILL.replica, stored_s=0.0, scheduled_s=0.0, steps=[]),
    )


def _done(rank: int, num_pages: int) -> Done:
    return Done(
        room=ROOM,
        prefill=PREFILL,
        decode_incarnation=DECODE.incarnation,
        sender_rank=rank,
        num_pages=num_pages,
        num_bytes=10 * num_pages,
    )


def _accepted() -> Accepted:
    return Accepted(room=ROOM, prefill=PREFILL, decode_incarnation=DECODE.incarnation)


def _drained() -> Drained:
    return Drained(room=ROOM, prefill=PREFILL, decode_incarnation=DECODE.incarnation)


def _refused() -> Refused:
    return Refused(room=ROOM, prefill=PREFILL, decode_incarnation=DECODE.incarnation, reason="no room")


def _state(session: ReceiverSession) -> ReceiverState:
    """Read the state in a call, so that the type checker does not narrow it."""
    return session.state


def _kind(session: ReceiverSession) -> FailureKind:
    assert session.failure is not None
    return session.failure.kind


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_it_is_ready_when_the_result_and_every_done_agree_in_any_order(order: tuple[int, ...]) -> None:
    session = _session()
    messages: list[FromPrefill] = [_result(), _done(0, 2), _done(1, 1)]
    for count, index in enumerate(order):
        assert not session.may_free
        assert session.state is ReceiverState.TICKETED, count
        assert session.handle(messages[index], 1.0) is None
    assert session.state is ReceiverState.READY
    assert session.may_free
    assert session.failure is None
    assert session.result == _result()


def test_repeated_messages_count_once() -> None:
    session = _session()
    for message in (_done(0, 2), _done(0, 2), _result(), _result(), _done(0, 2)):
        assert session.handle(message, 1.0) is None
    assert _state(session) is ReceiverState.TICKETED
    session.handle(_done(1, 1), 1.0)
    session.handle(_done(1, 1), 1.0)
    assert session.state is ReceiverState.READY
    assert session.num_dropped == {"duplicate": 3, "ready": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"room": Room(42)},
        {"decode_incarnation": Incarnation(6)},
        {"prefill": Peer(replica=PREFILL.replica, incarnation=Incarnation(2), address=PREFILL.address)},
        {"prefill": Peer(replica=ReplicaId("prefill-1"), incarnation=PREFILL.incarnation, address=PREFILL.address)},
    ],
)
def test_foreign_messages_change_nothing_and_are_counted(change: dict[str, object]) -> None:
    session = _session()
    foreign: list[FromPrefill] = [_drained(), _refused(), _done(0, 3), _result()]
    for message in foreign:
        assert session.handle(msgspec.structs.replace(message, **change), 1.0) is None
    assert session.state is ReceiverState.TICKETED
    assert session.result is None
    assert session.num_dropped == {"foreign": len(foreign)}


@pytest.mark.parametrize(
    "messages",
    [
        [_result(), _done(0, 2), _done(1, 2)],
        [_result(), _done(0, 1), _done(1, 1)],
        [_done(0, 2), _done(1, 1), _result(num_bytes=31)],
        [_done(0, 1), _done(1, 1), _result(num_pages=2, num_bytes=20)],
        [_result(), _done(0, 2), _done(7, 1), _done(1, 1)],
        [_done(0, 2), _done(0, 1)],
        [_result(token=1), _result(token=2)],
    ],
)
def test_a_mismatch_fails_and_must_still_be_drained(messages: list[Result | Done]) -> None:
    session = _session()
    revokes = [session.handle(message, 1.0) for message in messages]
    assert revokes[:-1] == [None] * (len(messages) - 1)
    assert revokes[-1] == Revoke(room=ROOM, decode=DECODE, prefill_incarnation=PREFILL.incarnation)
    assert _kind(session) is FailureKind.MISMATCH
    for message in (_result(), _done(0, 2), _done(1, 1)):
        session.handle(message, 1.0)
    assert not session.may_free
    session.handle(_drained(), 2.0)
    assert session.state is ReceiverState.RELEASED


def test_a_mismatch_names_all_three_counts() -> None:
    session = _session()
    for message in (_result(), _done(0, 1), _done(1, 1)):
        session.handle(message, 1.0)
    assert session.failure is not None
    assert session.failure.reason == (
        "prefill-0 sent 2 pages with 20 bytes, its result promised 3 pages with 30 bytes, "
        "and decode-1 expected 3 pages with 30 bytes"
    )


def test_a_silent_prefill_gets_the_ticket_again() -> None:
    session = _session()
    now_s = 0.0
    for _ in range(50):
        assert session.tick(now_s + TICKET_AGAIN_S - 1) is None
        now_s += TICKET_AGAIN_S
        assert session.tick(now_s) == session.ticket
        session.handle(_accepted(), now_s + 0.1)
    assert session.state is ReceiverState.TICKETED
    assert session.failure is None


def test_a_prefill_that_answers_no_ticket_is_given_up() -> None:
    session = _session()
    session.tick(TICKET_AGAIN_S)
    session.handle(_accepted(), TICKET_AGAIN_S)
    num_tickets, now_s = 0, TICKET_AGAIN_S
    while (said := session.tick(now_s := now_s + TICKET_AGAIN_S)) == session.ticket:
        num_tickets += 1
    assert isinstance(said, Revoke)
    assert num_tickets == SILENCE_S / TICKET_AGAIN_S + 1
    assert not session.may_free
    assert session.failure is not None
    assert session.failure.reason == f"prefill-0 answered none of {num_tickets} tickets of decode-1"


@pytest.mark.parametrize(("word", "missing"), [(_done(0, 2), "the result"), (_result(), "the pages of rank 1")])
def test_a_timeout_counts_from_the_last_message_and_names_missing_ones(word: Result | Done, missing: str) -> None:
    session = _session()
    session.handle(word, 1000.0)
    session.handle(_done(0, 2), 1050.0)
    since_s = 1050.0 if isinstance(word, Result) else 1000.0
    assert session.tick(since_s + SILENCE_S - 1) is None
    assert session.tick(since_s + SILENCE_S) is not None
    assert session.failure is not None
    assert session.failure.reason == (
        f"decode-1 waited for {missing} from prefill-0, which sent nothing for {SILENCE_S:g} s"
    )


def test_a_timeout_revokes_and_asks_again_but_never_frees() -> None:
    session = _session()
    session.handle(_done(0, 2), 0.0)
    assert session.tick(SILENCE_S - 1) is None
    now_s = SILENCE_S
    for _ in range(50):
        assert isinstance(session.tick(now_s), Revoke)
        assert session.tick(now_s) is None
        assert not session.may_free
        now_s += REVOKE_AGAIN_S
    assert _kind(session) is FailureKind.TIMED_OUT
    session.handle(_drained(), now_s)
    assert session.state is ReceiverState.RELEASED


def test_cancel_before_the_ticket_frees_at_once() -> None:
    session = _session(is_open=False)
    assert not session.may_free
    assert session.tick(1e9) is None
    assert session.cancel("client left", 1.0) is None
    assert session.state is ReceiverState.RELEASED
    assert _kind(session) is FailureKind.CANCELLED


def test_cancel_after_the_ticket_waits_for_drained() -> None:
    session = _session()
    assert session.cancel("client left", 1.0) is not None
    assert session.cancel("client left", 1.0) is None
    assert not session.may_free
    session.handle(_drained(), 2.0)
    assert session.state is ReceiverState.RELEASED


def test_a_cancelled_transfer_that_is_complete_is_released() -> None:
    session = _session()
    session.cancel("client left", 1.0)
    for message in (_done(1, 1), _done(0, 2), _result()):
        assert not session.may_free
        session.handle(message, 1.0)
    assert session.state is ReceiverState.RELEASED
    session.handle(_drained(), 2.0)
    assert session.num_dropped == {"released": 1}


def test_refused_and_drained_free_at_once_since_nobody_writes() -> None:
    refused, drained = _session(), _session()
    refused.handle(_refused(), 1.0)
    drained.handle(_drained(), 1.0)
    assert refused.state is drained.state is ReceiverState.RELEASED
    assert refused.failure is not None
    assert refused.failure.reason == "prefill-0 refused: no room"
    assert _kind(drained) is FailureKind.STOPPED


def test_a_lost_prefill_frees_pages_after_its_bytes_have_settled() -> None:
    session = _session()
    session.prefill_gone(10.0)
    session.prefill_gone(12.0)
    assert _state(session) is ReceiverState.SETTLING
    assert session.cancel("client left", 12.0) is None
    assert session.tick(10.0 + SETTLE_S - 0.1) is None
    assert not session.may_free
    session.tick(10.0 + SETTLE_S)
    assert session.state is ReceiverState.RELEASED
    assert _kind(session) is FailureKind.PREFILL_GONE


def test_a_lost_prefill_frees_pages_at_once_if_no_bytes_can_be_in_flight() -> None:
    session = ReceiverSession(ticket([4]), PREFILL, num_pages=1, num_bytes=10, num_ranks=1, silence_s=9.0, settle_s=0.0)
    session.open(0.0)
    session.cancel("client left", 1.0)
    session.prefill_gone(1.0)
    assert session.state is ReceiverState.RELEASED
    assert _kind(session) is FailureKind.CANCELLED


def test_a_ready_transfer_stays_ready() -> None:
    session = _session()
    for message in (_result(), _done(0, 2), _done(1, 1), _refused(), _drained(), _done(5, 1)):
        session.handle(message, 1.0)
    assert session.cancel("client left", 2.0) is None
    session.prefill_gone(3.0)
    assert session.tick(1e9) is None
    assert session.state is ReceiverState.READY
    assert session.num_dropped == {"ready": 3}


def test_counts_alone_do_not_make_a_verified_transfer_ready() -> None:
    reported = [PageDigests(rank=0, spans=[(0, 10)], pages=[page], digests=[b"d"]) for page in (4, 5, 6)]
    for digests, state in ((reported, ReceiverState.READY), (reported[:2], ReceiverState.REVOKING)):
        session = ReceiverSession(
            ticket([4, 5, 6]),
            PREFILL,
            num_pages=3,
            num_bytes=30,
            num_ranks=1,
            silence_s=SILENCE_S,
            settle_s=SETTLE_S,
            verify=Verify.DIGEST,
        )
        session.open(0.0)
        session.handle(_result(), 0.0)
        session.handle(msgspec.structs.replace(_done(0, 1), digests=digests[:1]), 0.0)
        session.handle(msgspec.structs.replace(_done(1, 2), digests=digests[1:]), 0.0)
        assert session.state is state
    assert session.failure is not None
    assert session.failure.reason == "digests of prefill-0: 20 of 30 bytes are covered (transfer.verify)"
