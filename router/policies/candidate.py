"""What a policy sees: the replicas that may take a request, and the numbers it may use to choose."""

from collections.abc import Callable, Sequence

import msgspec

from cluster.spec.ids import Room
from cluster.spec.peer import Peer


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What this router has open at one replica."""

    num_requests: int = 0
    num_tokens: int = 0
    """On prefill the prompts not yet computed; on decode prompts and the longest possible answers."""

    def plus(self, other: "Load") -> "Load":
        """Of both together."""
        return Load(num_requests=self.num_requests + other.num_requests, num_tokens=self.num_tokens + other.num_tokens)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that may take the request."""

    peer: Peer
    load: Load
    cached_tokens: int = 0
    """Of the request's prompt, as far as is known; only ``prefix_aware`` is told."""


class Bounds(msgspec.Struct, frozen=True):
    """How unevenly requests may be spread for the sake of cached prefixes."""

    max_imbalance: int = 32
    max_ratio: float = 2.0

    def are_exceeded(self, fewest: int, most: int) -> bool:
        """Whether the replica with the most requests has too many more than the one with the fewest."""
        return most - fewest > self.max_imbalance and most > self.max_ratio * fewest


class Chance(msgspec.Struct, frozen=True, kw_only=True):
    """The only things besides the candidates that a choice may depend on."""

    turn: int
    """Choices made before this one."""
    unit: float
    """Uniform over [0, 1)."""
    room: Room
    """Of the request."""
    session: str = ""
    """What the client calls the conversation that the request belongs to; empty for none."""
    bounds: Bounds = Bounds()


Policy = Callable[[Sequence[Candidate], Chance], Candidate]
"""Pure. Called by the router once per request and role, with at least one candidate, ordered by replica."""


def in_turn(candidates: Sequence[Candidate], chance: Chance) -> list[Candidate]:
    """The candidates, each of them first once in as many choices: ``min`` takes the first of equals."""
    first = chance.turn % len(candidates)
    return [*candidates[first:], *candidates[:first]]
