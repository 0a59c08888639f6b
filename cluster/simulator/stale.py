"""Late messages about another ticket than the current one.

A room has one ticket, handled by one start of either replica, so the simulator makes up what an earlier ticket, or one
between earlier starts, would have left in flight.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from cluster.simulator.surroundings import Surroundings
from cluster.spec.ids import Incarnation, Peer
from cluster.spec.messages import Message
from cluster.spec.transfer_messages import Done, Drained, Result, Ticket


def send_late_words(around: Surroundings, ticket: Ticket, page_bytes: int) -> None:
    """Sometimes deliver prefill's response to another ticket of the room after this one was sent."""
    if around.random.random() >= around.hazards.stale:
        return
    around.happened["stale"] += 1
    prefill = around.submits[ticket.room].prefill
    assert prefill is not None, f"room {ticket.room} has a ticket and no prefill"
    earlier, writer = around.random.choice(
        [
            (replace(ticket, generation=ticket.generation - 1), prefill),
            (replace(ticket, decode=_earlier(ticket.decode)), prefill),
            (ticket, _earlier(prefill)),
        ]
    )
    word = around.random.choice(_WORDS)(earlier, writer, sum(map(len, ticket.pages)), page_bytes)
    send = partial(around.network.send, prefill.address, ticket.decode.address, word)
    around.after(around.random.uniform(0, 0.1), send)


def _earlier(peer: Peer) -> Peer:
    return replace(peer, incarnation=Incarnation(peer.incarnation - 1))


def _drained(ticket: Ticket, prefill: Peer, _num_pages: int, _page_bytes: int) -> Drained:
    return Drained(**_names(ticket, prefill))


def _done(ticket: Ticket, prefill: Peer, num_pages: int, page_bytes: int) -> Done:
    return Done(**_names(ticket, prefill), sender_rank=0, num_pages=num_pages, num_bytes=num_pages * page_bytes)


def _result(ticket: Ticket, prefill: Peer, num_pages: int, page_bytes: int) -> Result:
    num_bytes = num_pages * page_bytes
    return Result(**_names(ticket, prefill), token_ids=[0], senders=[0], num_pages=num_pages, num_bytes=num_bytes)


def _names(ticket: Ticket, prefill: Peer) -> dict[str, Any]:
    """Return the fields that identify a response to a ticket."""
    return {
        "room": ticket.room,
        "generation": ticket.generation,
        "prefill": prefill,
        "decode_incarnation": ticket.decode.incarnation,
    }


_WORDS: Sequence[Callable[[Ticket, Peer, int, int], Message]] = (_drained, _done, _result)
