"""Events that the supervisor handles, and the actions that it requests in return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.spec.errors import BatonError
from cluster.spec.ids import Incarnation
from cluster.spec.registry import TableSnapshot
from cluster.supervisor.commands import OperatorCommand


@dataclass(frozen=True, slots=True)
class _OfStart:
    """Base class of events and actions that concern one incarnation of a member."""

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
    """The processes of a member were killed; ``proven`` means that all are confirmed dead."""

    proven: bool


@dataclass(frozen=True, slots=True)
class Proven(_OfStart):
    """All processes of an incarnation that ended without proof are now confirmed dead."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The cluster was asked to stop. A second request stops it immediately."""

    reason: str


@dataclass(frozen=True, slots=True)
class ClusterDrained:
    """The routers have finished their open requests, or timed out."""

    complete: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """Every process has ended."""


@dataclass(frozen=True, slots=True)
class TableSeen:
    """The rank table changed, or is readable again."""

    ready: frozenset[tuple[str, Incarnation]]
    """Incarnations of replicas whose ranks are all alive."""
    draining: frozenset[tuple[str, Incarnation]]
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
class TableUnchanged:
    """The bootstrap service answered that the rank table has not changed."""


@dataclass(frozen=True, slots=True)
class TableLost:
    """The bootstrap service did not respond with a table."""


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """Result of a liveness check of a router process."""

    name: str
    responds: bool


@dataclass(frozen=True, slots=True)
class Examined(_OfStart):
    """The actor system's answer about the processes of a silent member."""

    lives: bool | None
    """False if one has ended; None if the actor system does not answer, which proves nothing about the member."""


@dataclass(frozen=True, slots=True)
class SystemLost:
    """The actor system has died, and with it every way to start and end processes."""

    reason: str


@dataclass(frozen=True, slots=True)
class CommandReceived:
    """An operator's command arrived. Its answers carry the same number."""

    number: int
    command: OperatorCommand


@dataclass(frozen=True, slots=True)
class Placed:
    """Result of placing new replicas."""

    refusal: BatonError | None


@dataclass(frozen=True, slots=True)
class ReplicaDrained(_OfStart):
    """A replica has finished its open requests, or timed out."""

    complete: bool


@dataclass(frozen=True, slots=True)
class ReplicaResumed(_OfStart):
    """A replica takes new requests again, or timed out before confirming it."""

    complete: bool


Event = (
    Tick
    | Started
    | Failed
    | Ended
    | Proven
    | StopRequested
    | ClusterDrained
    | Stopped
    | TableSeen
    | TableUnchanged
    | TableLost
    | RouterSeen
    | Examined
    | SystemLost
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
class Examine(_OfStart):
    """Ask the actor system whether a silent member's processes live; answer with Examined."""


@dataclass(frozen=True, slots=True)
class Prove(_OfStart):
    """Check repeatedly until the processes of an ended incarnation are confirmed dead; then answer with Proven."""


@dataclass(frozen=True, slots=True)
class MarkEnded(_OfStart):
    """Mark this and earlier incarnations as ended in the rank table; ``proven`` means that no process is left."""

    proven: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """Print that the cluster is up."""


@dataclass(frozen=True, slots=True)
class DrainCluster:
    """Drain the routers, and let replicas store their pages; answer with ClusterDrained."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop all members in order; answer with Stopped."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill all members immediately; answer with Stopped."""


@dataclass(frozen=True, slots=True)
class Report:
    """Print one line for the user."""

    line: str


@dataclass(frozen=True, slots=True)
class Place:
    """Place new replicas; answer with Placed."""

    names: Sequence[str]
    wait_s: float = 0.0
    """Maximum wait for missing machines, in seconds."""


@dataclass(frozen=True, slots=True)
class DrainReplica(_OfStart):
    """Drain a replica; answer with ReplicaDrained."""

    grace_s: float | None
    """Maximum wait in seconds; None means `router.drain_s`."""


@dataclass(frozen=True, slots=True)
class ResumeReplica(_OfStart):
    """Let a replica take new requests again; answer with ReplicaResumed."""


class Outcome(StrEnum):
    GOING_ON = "going on"
    DONE = "done"
    REFUSED = "refused"
    """The command was refused and has changed nothing."""
    FAILED = "failed"
    """The command was carried out only in part."""


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """Report the progress of a command to its sender."""

    number: int
    line: str
    outcome: Outcome


Action = (
    Start
    | End
    | Examine
    | Prove
    | MarkEnded
    | Announce
    | DrainCluster
    | Stop
    | Kill
    | Report
    | Place
    | DrainReplica
    | ResumeReplica
    | CommandAnswer
)
