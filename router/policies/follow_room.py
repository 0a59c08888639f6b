"""The room decides: whoever knows the room and the replicas knows where the request is."""

from collections.abc import Sequence

from router.policies.candidate import Candidate, Chance


def follow_room(candidates: Sequence[Candidate], chance: Chance) -> Candidate:
    """The room's number modulo the number of replicas, in their order."""
    return candidates[chance.room % len(candidates)]
