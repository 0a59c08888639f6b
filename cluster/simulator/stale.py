"""Late words of a ticket before the one at hand.

Nothing numbers a second ticket of a room yet, so the simulator makes up what an earlier one would have left on its way.
"""

from functools import partial

from cluster.simulator.surroundings import Surroundings
from cluster.spec.peer import Peer
from cluster.spec.transfer_messages import Done, Drained, Ticket


def send_late_words(around: Surroundings, ticket: Ticket) -> None:
    """Now and then, let prefill's answers to the ticket before this one arrive after it was sent."""
    if around.random.random() >= around.hazards.stale:
        return
    around.happened["stale"] += 1
    prefill = around.submits[ticket.room].prefill
    assert prefill is not None, f"room {ticket.room} has a ticket and no prefill"
    word = _done(ticket, prefill) if around.random.random() < 0.5 else _drained(ticket, prefill)
    send = partial(around.network.send, prefill.address, ticket.decode.address, word)
    around.after(around.random.uniform(0, 0.1), send)


def _drained(ticket: Ticket, prefill: Peer) -> Drained:
    return Drained(
        room=ticket.room,
        generation=ticket.generation - 1,
        prefill=prefill,
        decode_incarnation=ticket.decode.incarnation,
    )


def _done(ticket: Ticket, prefill: Peer) -> Done:
    return Done(
        room=ticket.room,
        generation=ticket.generation - 1,
        prefill=prefill,
        decode_incarnation=ticket.decode.incarnation,
        sender_rank=0,
        num_pages=0,
        num_bytes=0,
    )
