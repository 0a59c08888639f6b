"""Every address gets the same outputs in the same order, among its other messages."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.messages import Failure, Message, Output, Outputs
from workers.scheduler.replica_leader import outputs_together


def message_of(number: int, is_output: bool) -> Message:
    room, replica, incarnation = Room(number), ReplicaId("decode-0"), Incarnation(1)
    if is_output:
        return Output(room=room, replica=replica, incarnation=incarnation, first_index=0, token_ids=[number])
    return Failure(room=room, replica=replica, incarnation=incarnation, reason="", retryable=True)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans()), max_size=12))
def test_each_address_sees_the_same(kinds: list[tuple[str, bool]]) -> None:
    outgoing = [(address, message_of(number, is_output)) for number, (address, is_output) in enumerate(kinds)]
    sent = list(outputs_together(outgoing))
    for address in ("a", "b"):
        apart: list[Message] = []
        for _, message in [pair for pair in sent if pair[0] == address]:
            apart += message.outputs if isinstance(message, Outputs) else [message]
        assert apart == [message for to, message in outgoing if to == address]
    kinds_sent = [(address, type(message)) for address, message in sent if address == "a"]
    assert (("a", Outputs), ("a", Outputs)) not in pairwise(kinds_sent)
