"""The replica with the fewest requests before it."""

from collections.abc import Sequence

from router.policies.candidate import Candidate, Chance, in_turn


def least_requests(candidates: Sequence[Candidate], chance: Chance) -> Candidate:
    """Fewest requests, then fewest tokens; equals take turns."""
    return min(
        in_turn(candidates, chance), key=lambda candidate: (candidate.load.num_requests, candidate.load.num_tokens)
    )
