"""The better of two replicas drawn at random: nearly as good as the best of all, where loads are known late."""

from collections.abc import Sequence

from router.policies.candidate import Candidate, Chance
from router.policies.least_tokens import least_tokens


def power_of_two(candidates: Sequence[Candidate], chance: Chance) -> Candidate:
    """Two different ones, every pair equally likely, then fewest tokens (Mitzenmacher, 1996)."""
    if len(candidates) == 1:
        return candidates[0]
    first, step = divmod(int(chance.unit * len(candidates) * (len(candidates) - 1)), len(candidates) - 1)
    second = (first + 1 + step) % len(candidates)
    return least_tokens([candidates[first], candidates[second]], chance)
