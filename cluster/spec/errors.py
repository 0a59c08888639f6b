"""Every error Baton raises on purpose, and the check of every state machine's transitions.

BatonError
├── UserError              the user can mend it: one line, exit code 2 or HTTP 4xx
│   └── ConfigError        every problem of a deploy YAML at once
├── TransferError          bytes could not be moved
├── PeerUnreachableError   a process that should listen does not
├── QuarantineError        a replica has too few pages left that nobody may still write to
├── PeerLostError          a worker of the same replica has ended; its own error says why
└── IllegalTransitionError a state machine was asked for a move its table does not hold (our own bug)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

State = TypeVar("State", bound=Enum)
Moves = Mapping[State, frozenset[State]]
"""Transitions that a state machine allows, by state."""


class BatonError(Exception):
    """Base of all errors raised on purpose."""


class UserError(BatonError, ValueError):
    """Invalid user input; the message says what is wrong, what was given and what is allowed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration."""

    path: str
    """Dotted path of the key, for example ``prefill.parallel.cp``."""
    message: str
    """Message with what is wrong, what was given and what is allowed; without the path."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigError(UserError):
    """Invalid deploy YAML; carries every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        """Pickle by problems: the error may be raised in another process than the one that shows it."""
        return ConfigError, (self.problems,)


class TransferError(BatonError):
    """Failure of a transfer backend to move bytes."""


class PeerUnreachableError(BatonError):
    """Failure to hand a message to its receiver."""


class QuarantineError(BatonError):
    """Replica in which peers may still write to so many pages that it must restart with new memory."""


class PeerLostError(BatonError):
    """Consequence of the end of another worker of the same replica; not a cause."""


class IllegalTransitionError(BatonError, AssertionError):
    """Transition that the state machine's table does not contain."""


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
