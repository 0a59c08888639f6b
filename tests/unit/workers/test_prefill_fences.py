"""Words of others than the decode replica and start of a request change nothing for a prefill leader."""

import pytest
from msgspec.structs import replace

from cluster.spec.ids import Incarnation, ReplicaId, Role
from cluster.spec.messages import Cancel, Message
from cluster.spec.step_messages import SendReport
from cluster.spec.transfer_messages import Drained, Revoke, SendState, Ticket
from tests.fakes.leader_pair import PROMPT, LeaderPair

EARLIER = Incarnation(0)


def pair_with_ticket() -> tuple[LeaderPair, Ticket]:
    """Prefill has the request; decode's ticket is on its way."""
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    pair.tell(Role.PREFILL, submit)
    (ticket,) = (said for said in pair.tell(Role.DECODE, submit) if isinstance(said, Ticket))
    return pair, ticket


def revoke_of(ticket: Ticket) -> Revoke:
    return Revoke(
        room=ticket.room,
        generation=ticket.generation,
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
        pair.tell(Role.PREFILL, ticket)
    message = foreign(ticket)[name]
    assert pair.tell(Role.PREFILL, message, message) == []
    assert pair.prefill.load().dropped == {type(message).__name__: 2}
    pair.tell(Role.PREFILL, ticket)
    plan = pair.prefill.next_plan()
    assert plan is not None
    assert [admit.room for admit in plan.admits] == [ticket.room]


def test_a_revoke_of_another_ticket_is_dropped() -> None:
    pair, ticket = pair_with_ticket()
    pair.tell(Role.PREFILL, ticket)
    assert pair.tell(Role.PREFILL, replace(revoke_of(ticket), generation=ticket.generation + 1)) == []
    assert pair.prefill.load().dropped == {"Revoke": 1}


def test_a_foreign_ticket_that_comes_early_is_dropped_with_the_request() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    (ticket,) = (said for said in pair.tell(Role.DECODE, submit) if isinstance(said, Ticket))
    pair.tell(Role.PREFILL, foreign(ticket)["ticket of another replica"])
    assert pair.prefill.load().dropped == {}
    pair.tell(Role.PREFILL, submit)
    assert pair.prefill.load().dropped == {"Ticket": 1}


def test_reports_of_another_ticket_prove_nothing() -> None:
    """Every rank says of another generation that it writes nothing more; decode must not hear so of this one."""
    pair, ticket = pair_with_ticket()
    pair.tell(Role.PREFILL, ticket)
    pair.prefill.next_plan()
    reports = [
        SendReport(room=ticket.room, generation=ticket.generation + 1, sender_rank=rank, state=SendState.DRAINED)
        for rank in range(2)
    ]
    pair.tell(Role.PREFILL, revoke_of(ticket), *reports)
    assert pair.prefill.load().dropped == {"SendReport": 2}
    pair.prefill.tick(1.0)
    assert not any(isinstance(message, Drained) for _, message in pair.prefill.outgoing)


def test_decode_counts_what_comes_twice_or_of_another_ticket() -> None:
    pair = LeaderPair()
    submit = pair.submit(PROMPT)
    late = Drained(room=submit.room, generation=7, prefill=pair.prefill_peer, decode_incarnation=Incarnation(1))
    pair.tell(Role.DECODE, submit, submit, late, late)
    assert pair.decode.load().dropped == {"Submit": 1, "Drained": 2}
