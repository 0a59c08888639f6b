"""State of the supervisor: the desired and the actual state of every member, as immutable data.

The members are the bootstrap service, the routers and the replicas. When a member fails, its processes are killed and
it is restarted with exponential backoff. A failure during the first start ends the cluster.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cluster.spec.errors import Moves, move
from cluster.spec.ids import Incarnation
from cluster.supervisor.commands import OperatorCommand

NEVER = Incarnation(0)
"""Incarnation of a member that was never started."""
MAX_BACKOFF_S = 60.0
STABLE_S = 60.0
"""Uptime after which a member's earlier failures are forgotten."""
LOOK_S = 1.0
"""Interval between checks of silent members."""


class MemberState(StrEnum):
    WAITING = "waiting"
    """No process exists; the member starts at ``wake_s``."""
    STARTING = "starting"
    """Processes exist, but are not ready yet."""
    RUNNING = "running"
    DRAINING = "draining"
    """The member finishes its open requests before it ends."""
    ENDING = "ending"
    """The member has failed or is drained; its processes are being killed."""
    REMOVED = "removed"
    """No process exists, and none is desired."""


MEMBER_MOVES: Moves[MemberState] = {
    MemberState.WAITING: frozenset({MemberState.STARTING, MemberState.REMOVED}),
    MemberState.STARTING: frozenset({MemberState.RUNNING, MemberState.ENDING}),
    MemberState.RUNNING: frozenset({MemberState.DRAINING, MemberState.ENDING}),
    MemberState.DRAINING: frozenset({MemberState.ENDING}),
    MemberState.ENDING: frozenset({MemberState.WAITING, MemberState.REMOVED}),
    MemberState.REMOVED: frozenset({MemberState.WAITING}),
}


class ClusterPhase(StrEnum):
    STARTING = "starting"
    """First start: some members have never been ready."""
    SERVING = "serving"
    """Requests are accepted, and failed members are restarted."""
    DRAINING = "draining"
    """The routers finish their open requests; nothing is restarted."""
    STOPPING = "stopping"
    KILLING = "killing"
    STOPPED = "stopped"


PHASE_MOVES: Moves[ClusterPhase] = {
    ClusterPhase.STARTING: frozenset({ClusterPhase.SERVING, ClusterPhase.STOPPING, ClusterPhase.KILLING}),
    ClusterPhase.SERVING: frozenset({ClusterPhase.DRAINING, ClusterPhase.KILLING}),
    ClusterPhase.DRAINING: frozenset({ClusterPhase.STOPPING, ClusterPhase.KILLING}),
    ClusterPhase.STOPPING: frozenset({ClusterPhase.KILLING, ClusterPhase.STOPPED}),
    ClusterPhase.KILLING: frozenset({ClusterPhase.STOPPED}),
    ClusterPhase.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    s: float
    """Time in monotonic seconds."""
    unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    name: str
    state: MemberState = MemberState.WAITING
    incarnation: Incarnation = NEVER
    wake_s: float = 0.0
    """Time of the next start, in state WAITING."""
    running_since_s: float = 0.0
    num_failures: int = 0
    """Number of failures since the last stable run."""
    first_error: str = ""
    is_desired: bool = True

    @property
    def is_settled(self) -> bool:
        return self.state is (MemberState.RUNNING if self.is_desired else MemberState.REMOVED)

    def moved(self, target: MemberState, event: str) -> "Member":
        return replace(self, state=move(MEMBER_MOVES, self.state, target, event, self.name))


@dataclass(frozen=True, slots=True)
class Silence:
    incarnation: Incarnation
    since_s: float
    reason: str
    is_examined: bool = False
    """True while the actor system is asked about the member's processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCommand:
    number: int
    command: OperatorCommand
    at_work: frozenset[str] = frozenset()
    """Replicas that this command is draining, ending or starting."""
    todo: tuple[str, ...] = ()
    """Replicas to restart after those in ``at_work``."""
    is_waiting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    members: Mapping[str, Member]
    backoff_s: float
    """Wait before the first restart of a failed member."""
    phase: ClusterPhase = ClusterPhase.STARTING
    proven: Mapping[str, Incarnation] = field(default_factory=dict)
    """Highest incarnation per member that is itself confirmed dead; earlier ones may still be alive."""
    unproven: Mapping[str, frozenset[Incarnation]] = field(default_factory=dict)
    """Incarnations that ended without proof; their processes may still write."""
    reaped: Mapping[str, Incarnation] = field(default_factory=dict)
    """Highest incarnation per member that is confirmed dead together with all earlier ones."""
    failure: BaseException | None = None
    patience_s: float = math.inf
    """Maximum time for which a running member may be silent."""
    silent: Mapping[str, Silence] = field(default_factory=dict)
    looked_s: float = 0.0
    answered_s: float = 0.0
    """Time of the bootstrap service's latest answer. Nothing is known about the replicas after it."""
    draining: frozenset[tuple[str, Incarnation]] = frozenset()
    """Incarnations of replicas that, according to the rank table, take no new requests."""
    open_command: OpenCommand | None = None

    def with_member(self, member: Member) -> "Cluster":
        return replace(self, members={**self.members, member.name: member})

    def moved(self, target: ClusterPhase, event: str) -> "Cluster":
        return replace(self, phase=move(PHASE_MOVES, self.phase, target, event, "the cluster"))

    def addressed(self, name: str, incarnation: Incarnation, *states: MemberState) -> Member | None:
        """Return the member that an event concerns; None if the event belongs to another incarnation or state."""
        member = self.members[name]
        return member if member.incarnation == incarnation and member.state in states else None

    def next_wake_s(self) -> float | None:
        """Return the time of the next Tick, or None if none is due."""
        if self.phase not in (ClusterPhase.STARTING, ClusterPhase.SERVING):
            return None
        waiting = [member.wake_s for member in self.members.values() if member.state is MemberState.WAITING]
        look_s = self.next_look_s()
        return min([*waiting, *([] if look_s is None else [look_s])], default=None)

    def next_look_s(self) -> float | None:
        """Return the time of the next check of silent members, or None if no member is silent.

        Checks are frequent so that the driver notices its own suspension.
        """
        return self.looked_s + LOOK_S if self.silences() else None

    def silences(self) -> list[tuple[Member, Silence]]:
        """Return the silent members that may be restarted."""
        if self.phase is not ClusterPhase.SERVING:
            return []
        states = (MemberState.RUNNING, MemberState.DRAINING)
        found = [(self.addressed(name, silence.incarnation, *states), silence) for name, silence in self.silent.items()]
        return [(member, silence) for member, silence in found if member is not None]
