"""One after the other."""

from collections.abc import Sequence

from router.policies.candidate import Candidate, Chance


def round_robin(candidates: Sequence[Candidate], chance: Chance) -> Candidate:
    """The next one in order."""
    return candidates[chance.turn % len(candidates)]
