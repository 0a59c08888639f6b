"""Events that the supervisor handles, and the actions it requests in return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.spec.errors import BatonError
from cluster.spec.ids import ROUTER, Incarnation
from cluster.spec.registry import TableSnapshot
from cluster.supervisor.commands import Command


@dataclass(frozen=True, slots=True)
class _OfStart:
    """Base of events and actions about one start of a member."""

    name: str
    incarnation: Incarnation


# ---- events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Started(_OfStart):
    """A member is ready for use."""


@dataclass(frozen=True, slots=True)
class Failed(_OfStart):
    """A member could not start, or one of its processes has ended."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Ended(_OfStart):
    """A failed member has ended; ``proven`` if it is certain that none of its processes is left."""

    proven: bool


@dataclass(frozen=True, slots=True)
class Proven(_OfStart):
    """Processes of a start that ended without a proof are gone."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The cluster was asked to stop; the second time, at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The router has finished its open requests, or its time ran out."""

    complete: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """Every process has ended."""


@dataclass(frozen=True, slots=True)
class TableSeen:
    """The rank table changed, or is readable again."""

    ready: frozenset[tuple[str, Incarnation]]
    """Starts of replicas whose ranks are all alive."""
    draining: frozenset[tuple[str, Incarnation]]
    """Starts of replicas that take no new requests."""
    silent: Mapping[str, Sequence[int]]
    """Silent ranks by replica."""

    @classmethod
    def of(cls, snapshot: TableSnapshot) -> "TableSeen":
        entries = snapshot.replicas
        return cls(
            ready=frozenset((entry.replica, entry.incarnation) for entry in entries if entry.ready),
            draining=frozenset((entry.replica, entry.incarnation) for entry in entries if entry.load.draining),
            silent={entry.replica: entry.silent for entry in entries if entry.silent},
        )


@dataclass(frozen=True, slots=True)
class TableLost:
    """The bootstrap service does not respond, or not with a table."""


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """Result of a liveness check of a router process."""

    answers: bool
    name: str = ROUTER


@dataclass(frozen=True, slots=True)
class CommandReceived:
    """An operator's command arrived; respond with Answer, as often as there is something to report."""

    number: int
    """Number that identifies the command."""
    command: Command


@dataclass(frozen=True, slots=True)
class Placed:
    """Result of placing new replicas."""

    refusal: BatonError | None


@dataclass(frozen=True, slots=True)
class ReplicaDrained(_OfStart):
    """A replica has finished its open requests, or its time ran out."""

    complete: bool


@dataclass(frozen=True, slots=True)
class ReplicaResumed(_OfStart):
    """A replica takes new requests again, or did not confirm it in time."""

    complete: bool


Event = (
    Tick
    | Started
    | Failed
    | Ended
    | Proven
    | StopRequested
    | Drained
    | Stopped
    | TableSeen
    | TableLost
    | RouterSeen
    | CommandReceived
    | Placed
    | ReplicaDrained
    | ReplicaResumed
)


# ---- actions


@dataclass(frozen=True, slots=True)
class Start(_OfStart):
    """Start a member; answer with Started or Failed."""


@dataclass(frozen=True, slots=True)
class End(_OfStart):
    """Kill a member's processes; answer with Ended."""


@dataclass(frozen=True, slots=True)
class Prove(_OfStart):
    """Check repeatedly whether the processes of an ended start are gone; answer with Proven once they are."""


@dataclass(frozen=True, slots=True)
class MarkEnded(_OfStart):
    """Report to the rank table that an incarnation, and all before it, are over; ``proven`` if their processes are
    gone.
    """

    proven: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """Print that the cluster is up."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain the router; answer with Drained."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop everything in order; answer with Stopped."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill everything at once; answer with Stopped."""


@dataclass(frozen=True, slots=True)
class Report:
    """Print one line for the user."""

    line: str


@dataclass(frozen=True, slots=True)
class Place:
    """Place new replicas; answer with Placed."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class DrainReplica(_OfStart):
    """Drain a replica; answer with ReplicaDrained."""

    grace_s: float | None
    """Maximum wait; `router.drain_s` by default."""


@dataclass(frozen=True, slots=True)
class ResumeReplica(_OfStart):
    """Let a replica take new requests again; answer with ReplicaResumed."""


class Outcome(StrEnum):
    """Progress of an operator's command."""

    GOING_ON = "going on"
    DONE = "done"
    REFUSED = "refused"
    """Nothing was done."""
    FAILED = "failed"
    """Some of it was not done."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Report the progress of a command to its sender."""

    number: int
    line: str
    outcome: Outcome


Action = (
    Start
    | End
    | Prove
    | MarkEnded
    | Announce
    | Drain
    | Stop
    | Kill
    | Report
    | Place
    | DrainReplica
    | ResumeReplica
    | Answer
)
