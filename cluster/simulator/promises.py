"""Checks that requests end once, that attempts are cancelled, and that leaders drop other incarnations' messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.simulator.device import answer
from cluster.simulator.memory import Violation
from cluster.simulator.scenario import ClientRequest
from cluster.spec.ids import Incarnation, Peer, Room
from cluster.spec.messages import (
    Cancel,
    Command,
    Failure,
    Inquire,
    Message,
    Output,
    Submit,
    SubscribeKvEvents,
)
from cluster.spec.transfer_messages import Done, Drained, Refused, Result, Revoke, Ticket
from workers.scheduler.replica_leader import ReplicaLeader


def deliver_to_leader(leader: ReplicaLeader, me: Peer, message: Message, now_s: float) -> None:
    """Deliver a message to a leader, which must drop messages for another incarnation of its replica."""
    incarnation = _addressed(message, me)
    if incarnation in (None, me.incarnation):
        leader.on_message(message, now_s)
        return
    before = _num_dropped(leader)
    leader.on_message(message, now_s)
    if _num_dropped(leader) == before:
        raise Violation(f"{me.replica} accepts a {type(message).__name__} for another incarnation of this replica")


def _addressed(message: Message, me: Peer) -> Incarnation | None:
    """Return the incarnation that a message is addressed to, or None."""
    match message:
        case Submit():
            peers = filter(None, (message.prefill, message.decode))
            return next(peer.incarnation for peer in peers if peer.replica == me.replica)
        case Ticket() | Revoke():
            return message.prefill_incarnation
        case Result() | Done() | Refused() | Drained():
            return message.decode_incarnation
        case Cancel() | Inquire() | SubscribeKvEvents() | Command():
            return message.incarnation
        case _:
            return None


def _num_dropped(leader: ReplicaLeader) -> int:
    return sum(leader.load().dropped.values())


class CancelCheck:
    """Check that the router sends a Cancel to every replica that still works on a finished attempt."""

    def __init__(self) -> None:
        self._active: dict[Room, set[str]] = {}
        """Addresses of the replicas that have neither finished their part of an attempt nor been sent a Cancel."""
        self._submits: dict[Room, Submit] = {}

    def note_sent(self, address: str, message: Message) -> None:
        if isinstance(message, Submit):
            self._submits[message.room] = message
            self._active.setdefault(message.room, set()).add(address)
        elif isinstance(message, Cancel):
            self._drop(message.room, address)

    def note_received(self, message: Output | Failure) -> None:
        submit = self._submits.get(message.room)
        if submit is None:
            return
        sender = (message.replica, message.incarnation)
        for peer in filter(None, (submit.prefill, submit.decode)):
            has_ended = isinstance(message, Failure) or message.finish is not None
            if (peer.replica, peer.incarnation) == sender and has_ended:
                self._drop(message.room, peer.address)
        is_from_decode = sender == (submit.decode.replica, submit.decode.incarnation)
        if isinstance(message, Output) and is_from_decode and submit.prefill is not None:
            self._drop(message.room, submit.prefill.address)

    def check(self, is_under_way: Callable[[Room], bool]) -> None:
        for room, addresses in self._active.items():
            if not is_under_way(room):
                names = ", ".join(sorted(addresses))
                raise Violation(f"room {room}: the attempt is over, but no Cancel was sent to {names}")

    def _drop(self, room: Room, address: str) -> None:
        addresses = self._active.get(room, set())
        addresses.discard(address)
        if not addresses:
            self._active.pop(room, None)


class End(StrEnum):
    """End of a request, from the client's view."""

    FINISHED = "finished"
    FAILED = "failed"
    LEFT = "left"
    REFUSED = "refused"
    """A role had no ready replica."""
    DISCONNECTED = "disconnected"
    """The router died."""


@dataclass(slots=True, eq=False)
class Client:
    """Client that knows the right tokens in advance and checks each of them."""

    request: ClientRequest
    tokens: bytes = b""
    end: End | None = None
    reason: str = ""
    expected: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.expected = answer(self.request.prompt, self.request.max_tokens)

    def receive(self, token_ids: Sequence[int]) -> None:
        self.tokens += bytes(token_ids)
        if self.end is not None:
            raise Violation(f"tokens arrived after the request's end ({self.end})")
        if not self.expected.startswith(self.tokens):
            raise Violation(f"wrong tokens: got {list(self.tokens)}; expected: {list(self.expected)}")

    def finish(self, end: End, reason: str = "") -> None:
        if self.end is not None:
            raise Violation(f"the request ended twice: {self.end}, then {end}")
        if end is End.FINISHED and self.tokens != self.expected[: self.request.enough]:
            raise Violation(f"the output ended after {len(self.tokens)} of {self.request.max_tokens} tokens")
        self.end, self.reason = end, reason
