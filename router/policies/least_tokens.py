"""The replica with the least work before it."""

from collections.abc import Sequence

from router.policies.candidate import Candidate, Chance, in_turn


def least_tokens(candidates: Sequence[Candidate], chance: Chance) -> Candidate:
    """Fewest tokens, then fewest requests; equals take turns."""
    return min(
        in_turn(candidates, chance), key=lambda candidate: (candidate.load.num_tokens, candidate.load.num_requests)
    )
