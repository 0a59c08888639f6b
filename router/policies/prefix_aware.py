"""The replica that would have the least to compute, what it has cached of the prompt taken off."""

from collections.abc import Sequence

from router.policies.candidate import Candidate, Chance, in_turn
from router.policies.least_tokens import least_tokens


def prefix_aware(candidates: Sequence[Candidate], chance: Chance) -> Candidate:
    """Fewest tokens less those cached of this prompt, then fewest requests; equals take turns.

    A cached prefix is worth a queue of its own length, no longer one. Where nothing is cached, and where requests are
    spread more unevenly than ``chance.bounds`` allow, the choice is that of ``least_tokens``.
    """
    counts = [candidate.load.num_requests for candidate in candidates]
    if chance.bounds.are_exceeded(min(counts), max(counts)):
        return least_tokens(candidates, chance)
    return min(
        in_turn(candidates, chance),
        key=lambda candidate: (candidate.load.num_tokens - candidate.cached_tokens, candidate.load.num_requests),
    )
