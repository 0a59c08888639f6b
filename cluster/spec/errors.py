"""Errors that Baton raises on purpose, and the transition check of its state machines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

State = TypeVar("State", bound=Enum)
Moves = Mapping[State, frozenset[State]]
"""Transitions that a state machine allows from each state."""


class BatonError(Exception):
    """Base class of all errors that Baton raises on purpose."""


class UserError(BatonError, ValueError):
    """User-fixable error (exit code 2 or HTTP 4xx) that says what is wrong, what was given and what is allowed."""


@dataclass(frozen=True, slots=True)
class Problem:
    path: str
    """Dotted path of the key, for example ``prefill.parallel.cp``."""
    message: str
    """Error text without the path: what is wrong, what was given and what is allowed."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigError(UserError):
    """Error that lists every problem of a deploy file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        """Pickle the problems: the process that shows the error may not be the one that raised it."""
        return ConfigError, (self.problems,)


class TransferError(BatonError):
    """Failure of a transfer backend."""


class PeerUnreachableError(BatonError):
    """Failure to reach a process that should be listening."""


class QuarantineError(BatonError):
    """Too many quarantined pages, which peers may still write to: the replica must restart with new memory."""


class SystemLostError(BatonError):
    """The actor system has died, so that no process can be started or ended any more."""


class PeerLostError(BatonError):
    """Secondary error: a worker of the replica was lost or is late, and that worker's own error is the cause."""


class IllegalTransitionError(BatonError, AssertionError):
    """Transition that is not in the state machine's table: a bug in Baton."""


def move(moves: Moves[State], current: State, target: State, event: str, subject: object) -> State:
    """Return the target state if the table allows the transition.

    Raises:
        IllegalTransitionError: the table does not allow it; the message names state, event and subject.
    """
    if target not in moves[current]:
        allowed = ", ".join(sorted(state.name for state in moves[current])) or "nothing"
        raise IllegalTransitionError(
            f"{subject}: {event} would move {current.name} to {target.name}; allowed: {allowed}"
        )
    return target
