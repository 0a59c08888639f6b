"""Shows a policy what it may choose from, and its own chance each time."""

import itertools
import random
from collections.abc import Sequence

from cluster.spec.ids import Room
from cluster.spec.messages import Peer
from router.flight import Ask
from router.policies.candidate import Candidate, Chance
from router.policies.registry import find_policy


class Picker:
    """Picks the replicas of one role."""

    def __init__(self, policy: str) -> None:
        self._policy = find_policy(policy)
        self._turns = itertools.count()
        self._random = random.Random()

    def pick(self, candidates: Sequence[Candidate], ask: Ask, room: Room) -> Peer:
        """One of the candidates."""
        chance = Chance(turn=next(self._turns), unit=self._random.random(), room=room, session=ask.session)
        return self._policy(candidates, chance).peer
