"""Life cycles as tables: the legal transitions of every state machine, and the one function that makes a transition."""

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import TypeVar

from cluster.spec.errors import IllegalTransitionError
from cluster.spec.ids import ReplicaId

State = TypeVar("State", bound=Enum)
Moves = Mapping[State, frozenset[State]]


class Role(StrEnum):
    """Purpose of a pool of replicas."""

    PREFILL = "prefill"
    DECODE = "decode"


def role_of(replica: ReplicaId) -> Role:
    """Return the role in a replica's name."""
    return Role(replica.partition("-")[0])


def move(moves: Moves[State], current: State, target: State, event: str, subject: object) -> State:
    """Return the target state, if the table allows the transition.

    Raises:
        IllegalTransitionError: naming the state, the event and the subject's id.
    """
    if target not in moves[current]:
        allowed = ", ".join(sorted(state.name for state in moves[current])) or "nothing"
        raise IllegalTransitionError(
            f"{subject}: {event} would move {current.name} to {target.name}; allowed: {allowed}"
        )
    return target
