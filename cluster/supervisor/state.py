"""What the supervisor decides: wanted against actual, as a pure function from state and event to state and actions.

Everything that has to run is a member: the bootstrap service, the router, each replica. A member that fails is ended
as a whole and started again, after a wait that doubles. Before the cluster has been up once, a failure ends it all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cluster.spec.ids import Incarnation
from cluster.spec.lifecycle import Moves

NEVER = Incarnation(0)
"""The incarnation of what has not been started yet."""
MAX_BACKOFF_S = 60.0
STABLE_S = 60.0
"""A member that ran this long starts again as if for the first time."""


class MemberState(StrEnum):
    """Where one member is."""

    WAITING = "waiting"
    """No process; started at ``wake_s``."""
    STARTING = "starting"
    """Processes exist; not of use yet."""
    RUNNING = "running"
    """Of use."""
    ENDING = "ending"
    """Failed; its processes are being killed."""


MEMBER_MOVES: Moves[MemberState] = {
    MemberState.WAITING: frozenset({MemberState.STARTING}),
    MemberState.STARTING: frozenset({MemberState.RUNNING, MemberState.ENDING}),
    MemberState.RUNNING: frozenset({MemberState.ENDING}),
    MemberState.ENDING: frozenset({MemberState.WAITING}),
}


class Phase(StrEnum):
    """Where the whole cluster is."""

    STARTING = "starting"
    """Not every member has been up yet."""
    SERVING = "serving"
    """Requests are taken; members that fail are replaced."""
    DRAINING = "draining"
    """The router finishes its open requests; nothing is replaced."""
    STOPPING = "stopping"
    """Everything is being ended in order."""
    KILLING = "killing"
    """Everything is being ended at once."""
    STOPPED = "stopped"
    """Nothing is left."""


PHASE_MOVES: Moves[Phase] = {
    Phase.STARTING: frozenset({Phase.SERVING, Phase.STOPPING}),
    Phase.SERVING: frozenset({Phase.DRAINING}),
    Phase.DRAINING: frozenset({Phase.STOPPING, Phase.KILLING}),
    Phase.STOPPING: frozenset({Phase.KILLING, Phase.STOPPED}),
    Phase.KILLING: frozenset({Phase.STOPPED}),
    Phase.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The moment of an event."""

    s: float
    """Monotonic seconds."""
    unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One thing that has to run."""

    name: str
    state: MemberState = MemberState.WAITING
    incarnation: Incarnation = NEVER
    """Of the latest start."""
    wake_s: float = 0.0
    """While waiting: when to start."""
    running_since_s: float = 0.0
    was_of_use: bool = False
    """Whether the latest start has been running: others may have given it work."""
    num_failures: int = 0
    """In a row, without a stable run between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The whole of it."""

    members: Mapping[str, Member]
    backoff_s: float
    """First wait before a failed member is started again."""
    phase: Phase = Phase.STARTING
    proven: Mapping[str, Incarnation] = field(default_factory=dict)
    """Highest incarnation of each member whose own processes are proven gone."""
    unproven: Mapping[str, frozenset[Incarnation]] = field(default_factory=dict)
    """Starts that were of use and have ended without a proof: their processes may still write."""
    reaped: Mapping[str, Incarnation] = field(default_factory=dict)
    """Highest incarnation of each member that is proven gone together with all before it."""
    failure: BaseException | None = None
    """What ended the first start."""

    def with_member(self, member: Member) -> "Cluster":
        """The same cluster with one member changed."""
        return replace(self, members={**self.members, member.name: member})

    def next_wake_s(self) -> float | None:
        """When a Tick is due; None if only other events matter."""
        if self.phase not in (Phase.STARTING, Phase.SERVING):
            return None
        waiting = (member.wake_s for member in self.members.values() if member.state is MemberState.WAITING)
        return min(waiting, default=None)


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


Event = Tick | Started | Failed | Ended | Proven | StopRequested | Drained | Stopped


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
class MarkReaped:
    """Tell the rank table that the processes of an incarnation, and of all before it, are gone."""

    name: str
    incarnation: Incarnation


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


Action = Start | End | Prove | MarkReaped | Announce | Drain | Stop | Kill | Report
