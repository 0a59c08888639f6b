"""Every error Baton raises on purpose.

BatonError
├── UserError              the user can mend it: one line, exit code 2 or HTTP 4xx
│   └── ConfigError        every problem of a deploy YAML at once
├── TransferError          bytes could not be moved
├── PeerUnreachableError   a process that should listen does not
├── QuarantineError        a replica has too few pages left that nobody may still write to
├── PeerLostError          a worker of the same replica has ended; its own error says why
└── IllegalTransitionError a state machine was asked for a move its table does not hold (our own bug)
"""

from collections.abc import Sequence
from dataclasses import dataclass


class BatonError(Exception):
    """Base of all errors raised on purpose."""


class UserError(BatonError, ValueError):
    """Something the user gave is wrong; the message says what, what was given and what is allowed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration."""

    path: str
    """Dotted path of the key, for example ``prefill.parallel.cp``."""
    message: str
    """What is wrong, what was given, what is allowed; without the path."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigError(UserError):
    """A deploy YAML that cannot be used; carries every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        """Pickled by its problems: the error may be raised in another process than the one that shows it."""
        return ConfigError, (self.problems,)


class TransferError(BatonError):
    """A transfer backend could not move bytes."""


class PeerUnreachableError(BatonError):
    """A message could not be handed to the process it is for."""


class QuarantineError(BatonError):
    """So many pages of a replica may still be written to by others that it must begin anew, with other memory."""


class PeerLostError(BatonError):
    """What follows from the end of another worker of the same replica, and explains nothing."""


class IllegalTransitionError(BatonError, AssertionError):
    """A move that the state machine's table does not hold."""
