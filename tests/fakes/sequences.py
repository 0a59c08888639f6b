"""Sequences of the step scheduler without a router."""

from collections.abc import Sequence

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.messages import Submit
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.wire import TokenIds
from workers.scheduler.sequence import TokenSequence

PEER = Peer(replica=ReplicaId("decode-0"), incarnation=Incarnation(1), address="decode-0")


def sequence_of(
    room: int,
    prompt: Sequence[int],
    *,
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    max_len: int | None = None,
    priority: int = 0,
    owner_base: int = 0,
    tenant: str = "",
    weight: float = 1.0,
) -> TokenSequence:
    """Return a new sequence, which ends after one output token unless ``stopping`` says otherwise."""
    stopping = stopping or Stopping(max_tokens=1)
    submit = Submit(
        room=Room(room),
        prompt_ids=TokenIds.of(prompt),
        sampling=sampling or Sampling(),
        stopping=stopping,
        prefill=None,
        decode=PEER,
        router=PEER,
        priority=priority,
        tenant=tenant,
        weight=weight,
    )
    length = len(prompt) + stopping.max_tokens if max_len is None else max_len
    return TokenSequence(submit, length, list(prompt), owner_base=owner_base)
