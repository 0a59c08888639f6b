"""Any replica, all equally likely."""

from collections.abc import Sequence

from router.policies.candidate import Candidate, Chance


def random(candidates: Sequence[Candidate], chance: Chance) -> Candidate:
    """Uniform over the candidates."""
    return candidates[int(chance.unit * len(candidates))]
