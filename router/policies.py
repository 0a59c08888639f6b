"""Load-balancing policies: pure functions from the replicas that may take a request to the one that gets it.

A new policy is one function and one line in ``POLICIES``.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from cluster.spec.config import PolicyName
from cluster.spec.ids import Room
from cluster.spec.peer import Peer

MAX_IMBALANCE, MAX_RATIO = 32, 2.0
"""Requests that the busiest replica may have more than the idlest, and times as many, for the sake of cached prefixes.

Both must be exceeded, as in SGLang's router: a difference alone is common among many requests, a ratio among few.
"""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and tokens that this router has open at one replica."""

    num_requests: int = 0
    num_tokens: int = 0
    """Tokens of load: on prefill the prompts not yet computed; on decode prompts and the longest possible answers."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that may take the request."""

    peer: Peer
    load: Load
    cached_tokens: int = 0
    """Prompt tokens that it is known to have cached; set for ``prefix_aware`` only."""


class PickInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the candidates that a choice may depend on."""

    number: int
    """Choices made before this one."""
    unit: float
    """Uniform over [0, 1)."""
    room: Room
    session: str = ""
    """The client's name for the conversation; empty for none."""


Policy = Callable[[Sequence[Candidate], PickInputs], Candidate]
"""Called once per request and role, with at least one candidate, ordered by replica."""


def round_robin(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return candidates[inputs.number % len(candidates)]


def random(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick any, all equally likely."""
    return candidates[int(inputs.unit * len(candidates))]


def follow_room(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick by the room's number: whoever knows the room and the replicas knows where the request is."""
    return candidates[inputs.room % len(candidates)]


def least_requests(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the fewest requests, then the fewest tokens; ties alternate."""
    return min(_rotated(candidates, inputs), key=lambda one: (one.load.num_requests, one.load.num_tokens))


def least_tokens(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the fewest tokens, then the fewest requests; ties alternate."""
    return min(_rotated(candidates, inputs), key=lambda one: (one.load.num_tokens, one.load.num_requests))


def power_of_two(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the better of two at random (Mitzenmacher, 1996): nearly the best of all where loads are known late."""
    if len(candidates) == 1:
        return candidates[0]
    first, step = divmod(int(inputs.unit * len(candidates) * (len(candidates) - 1)), len(candidates) - 1)
    second = (first + 1 + step) % len(candidates)
    return least_tokens([candidates[first], candidates[second]], inputs)


def prefix_aware(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the fewest tokens less those cached of this prompt, then the fewest requests; ties alternate.

    A cached prefix is worth a queue of its own length and no longer one. Where nothing is cached, and where requests
    are spread too unevenly, this is ``least_tokens``.
    """
    counts = [candidate.load.num_requests for candidate in candidates]
    fewest, most = min(counts), max(counts)
    if most - fewest > MAX_IMBALANCE and most > MAX_RATIO * fewest:
        return least_tokens(candidates, inputs)
    return min(
        _rotated(candidates, inputs),
        key=lambda candidate: (candidate.load.num_tokens - candidate.cached_tokens, candidate.load.num_requests),
    )


def session(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the highest hash of session and replica; requests without a session go by ``least_tokens``.

    Rendezvous hashing: a replica that leaves moves only its own sessions, and a restarted one gets them back.
    """
    if not inputs.session:
        return least_tokens(candidates, inputs)
    name = inputs.session.encode()
    return max(candidates, key=lambda one: hashlib.blake2b(name, key=one.peer.replica.encode(), digest_size=8).digest())


POLICIES: Mapping[PolicyName, Policy] = {
    "round_robin": round_robin,
    "random": random,
    "power_of_two": power_of_two,
    "least_requests": least_requests,
    "least_tokens": least_tokens,
    "prefix_aware": prefix_aware,
    "session": session,
    "follow_room": follow_room,
}


def _rotated(candidates: Sequence[Candidate], inputs: PickInputs) -> list[Candidate]:
    """Begin with another candidate each time: ``min`` takes the first of equals."""
    first = inputs.number % len(candidates)
    return [*candidates[first:], *candidates[:first]]
