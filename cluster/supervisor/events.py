"""What the supervisor hears, and what it asks for in return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.spec.errors import BatonError
from cluster.spec.ids import ROUTER, Incarnation
from cluster.spec.registry import TableSnapshot
from cluster.supervisor.orders import Order

# ---- events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Started:
    """A member is of use."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Failed:
    """A member could not start, or one of its processes has ended."""

    name: str
    incarnation: Incarnation
    error: BaseException


@dataclass(frozen=True, slots=True)
class Ended:
    """No process of a failed member is wanted any more; ``proven`` that none is left."""

    name: str
    incarnation: Incarnation
    proven: bool


@dataclass(frozen=True, slots=True)
class Proven:
    """The processes of a start that had ended without a proof are gone."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the cluster to end; the second time, at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The router has ended its open requests, or its time was up."""

    complete: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """Every process has been ended."""


@dataclass(frozen=True, slots=True)
class TableSeen:
    """The rank table is new, or could be read again."""

    ready: frozenset[tuple[str, Incarnation]]
    """Starts of replicas all of whose ranks show life."""
    draining: frozenset[tuple[str, Incarnation]]
    """Those that take no new requests."""
    silent: Mapping[str, Sequence[int]]
    """Ranks that show none, by replica."""

    @classmethod
    def of(cls, snapshot: TableSnapshot) -> "TableSeen":
        """What a table tells."""
        entries = snapshot.replicas
        return cls(
            ready=frozenset((entry.replica, entry.incarnation) for entry in entries if entry.ready),
            draining=frozenset((entry.replica, entry.incarnation) for entry in entries if entry.load.draining),
            silent={entry.replica: entry.silent for entry in entries if entry.silent},
        )


@dataclass(frozen=True, slots=True)
class TableLost:
    """The bootstrap service does not answer, or not with a table."""


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """Somebody has looked for a sign of life of a router process."""

    answers: bool
    name: str = ROUTER


@dataclass(frozen=True, slots=True)
class Ordered:
    """An operator wants something; answer with Answer, as often as there is something to tell."""

    number: int
    """Told apart by it from other orders."""
    order: Order


@dataclass(frozen=True, slots=True)
class Placed:
    """There is room for new replicas, or there is not."""

    refusal: BatonError | None


@dataclass(frozen=True, slots=True)
class ReplicaDrained:
    """One replica has ended its open requests, or its time was up."""

    name: str
    incarnation: Incarnation
    complete: bool


@dataclass(frozen=True, slots=True)
class ReplicaResumed:
    """One replica takes new requests again, or did not say so in time."""

    name: str
    incarnation: Incarnation
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
    | Ordered
    | Placed
    | ReplicaDrained
    | ReplicaResumed
)


# ---- actions


@dataclass(frozen=True, slots=True)
class Start:
    """Start a member; answer with Started or Failed."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class End:
    """Kill a member's processes; answer with Ended."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Prove:
    """Look again and again whether the processes of an ended start are gone; answer with Proven once they are."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MarkEnded:
    """Tell the rank table that an incarnation, and all before it, are over; proven: their processes are gone."""

    name: str
    incarnation: Incarnation
    proven: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the user that the cluster is up."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Let the router end its open requests; answer with Drained."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End everything in order; answer with Stopped."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End everything at once; answer with Stopped."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the user one line."""

    line: str


@dataclass(frozen=True, slots=True)
class Place:
    """Find room for new replicas; answer with Placed."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class DrainReplica:
    """Let a replica take no new requests and end the open ones; answer with ReplicaDrained."""

    name: str
    incarnation: Incarnation
    grace_s: float | None
    """Longest wait; `router.drain_s` by default."""


@dataclass(frozen=True, slots=True)
class ResumeReplica:
    """Let a replica take new requests again; answer with ReplicaResumed."""

    name: str
    incarnation: Incarnation


class Outcome(StrEnum):
    """How far an order is."""

    GOING_ON = "going on"
    DONE = "done"
    REFUSED = "refused"
    """Nothing was done."""
    FAILED = "failed"
    """Not everything was done."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell whoever gave an order how far it is."""

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
