"""The promise that a message for another start of a replica changes nothing there, and is counted."""

from cluster.simulator.memory import Violation
from cluster.spec.ids import Incarnation
from cluster.spec.messages import Cancel, Command, FollowPages, Inquire, Message, Submit
from cluster.spec.peer import Peer
from cluster.spec.transfer_messages import Done, Drained, Refused, Result, Revoke, Ticket
from workers.scheduler.replica_leader import ReplicaLeader


def hand_over(leader: ReplicaLeader, me: Peer, message: Message, now_s: float) -> None:
    """Let a leader take a message in, and see that it drops one for another start of its replica."""
    incarnation = _addressed(message, me)
    if incarnation in (None, me.incarnation):
        leader.on_message(message, now_s)
        return
    before = _num_dropped(leader)
    leader.on_message(message, now_s)
    if _num_dropped(leader) == before:
        raise Violation(f"{me.replica} heeds a {type(message).__name__} for another start of it")


def _addressed(message: Message, me: Peer) -> Incarnation | None:
    """The start that a message is for; None where it does not say."""
    match message:
        case Submit():
            legs = filter(None, (message.prefill, message.decode))
            return next(leg.incarnation for leg in legs if leg.replica == me.replica)
        case Ticket() | Revoke():
            return message.prefill_incarnation
        case Result() | Done() | Refused() | Drained():
            return message.decode_incarnation
        case Cancel() | Inquire() | FollowPages() | Command():
            return message.incarnation
        case _:
            return None


def _num_dropped(leader: ReplicaLeader) -> int:
    return sum(leader.load().dropped.values())
