"""State of the supervisor: desired against actual, as a pure function from state and event to state and actions.

Everything that has to run is a member: the bootstrap service, the router, each replica. A member that fails is ended as
a whole and restarted, after a wait that doubles. Before the cluster has been up once, any failure ends it all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cluster.spec.errors import Moves, move
from cluster.spec.ids import Incarnation
from cluster.supervisor.commands import Command

NEVER = Incarnation(0)
"""Incarnation of a member that was never started."""
MAX_BACKOFF_S = 60.0
STABLE_S = 60.0
"""Uptime after which earlier failures of a member no longer count."""
LOOK_S = 1.0
"""Interval between checks of silent members."""


class MemberState(StrEnum):
    """State of one member."""

    WAITING = "waiting"
    """No process; started at ``wake_s``."""
    STARTING = "starting"
    """Processes exist; not ready yet."""
    RUNNING = "running"
    """Ready for use."""
    DRAINING = "draining"
    """Finishing what it has taken; ends after that."""
    ENDING = "ending"
    """Failed, or drained; its processes are being killed."""
    REMOVED = "removed"
    """No process, and none is desired."""


MEMBER_MOVES: Moves[MemberState] = {
    MemberState.WAITING: frozenset({MemberState.STARTING, MemberState.REMOVED}),
    MemberState.STARTING: frozenset({MemberState.RUNNING, MemberState.ENDING}),
    MemberState.RUNNING: frozenset({MemberState.DRAINING, MemberState.ENDING}),
    MemberState.DRAINING: frozenset({MemberState.ENDING}),
    MemberState.ENDING: frozenset({MemberState.WAITING, MemberState.REMOVED}),
    MemberState.REMOVED: frozenset({MemberState.WAITING}),
}


class Phase(StrEnum):
    """Phase of the whole cluster."""

    STARTING = "starting"
    """Some member has never been up."""
    SERVING = "serving"
    """Requests are taken; members that fail are replaced."""
    DRAINING = "draining"
    """The router finishes its open requests; nothing is replaced."""
    STOPPING = "stopping"
    """Everything is being ended in command."""
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
    """Time of an event."""

    s: float
    """Monotonic seconds."""
    unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One thing that has to run."""

    name: str
    state: MemberState = MemberState.WAITING
    incarnation: Incarnation = NEVER
    """Incarnation of the latest start."""
    wake_s: float = 0.0
    """Start time, while waiting."""
    running_since_s: float = 0.0
    num_failures: int = 0
    """Consecutive failures, without a stable run between them."""
    first_error: str = ""
    """First error of these failures."""
    is_desired: bool = True
    """True if it is restarted after it ends."""

    def moved(self, target: MemberState, event: str) -> "Member":
        return replace(self, state=move(MEMBER_MOVES, self.state, target, event, self.name))


@dataclass(frozen=True, slots=True)
class Silence:
    """Silence of one start of a member."""

    incarnation: Incarnation
    since_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCommand:
    """Command in progress."""

    number: int
    """Number to respond to."""
    command: Command
    at_work: frozenset[str] = frozenset()
    """Replicas that are being drained, ended or started for it."""
    todo: tuple[str, ...] = ()
    """Replicas that follow when those have settled."""
    is_waiting: bool = False
    """True while it waits for the result of an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Complete state of the cluster."""

    members: Mapping[str, Member]
    backoff_s: float
    """First wait before a failed member is restarted."""
    phase: Phase = Phase.STARTING
    proven: Mapping[str, Incarnation] = field(default_factory=dict)
    """Highest incarnation of each member whose own processes are proven gone."""
    unproven: Mapping[str, frozenset[Incarnation]] = field(default_factory=dict)
    """Starts that have ended without a proof: their processes may still write."""
    reaped: Mapping[str, Incarnation] = field(default_factory=dict)
    """Highest incarnation of each member that is proven gone together with all before it."""
    failure: BaseException | None = None
    """Error of the first start."""
    patience_s: float = math.inf
    """Maximum silence of a running member."""
    silent: Mapping[str, Silence] = field(default_factory=dict)
    """Running members that are silent."""
    looked_s: float = 0.0
    """Time of the latest event."""
    draining: frozenset[tuple[str, Incarnation]] = frozenset()
    """Starts of replicas that take no new requests, as the rank table shows them."""
    open_command: OpenCommand | None = None
    """Command in progress."""

    def with_member(self, member: Member) -> "Cluster":
        return replace(self, members={**self.members, member.name: member})

    def moved(self, target: Phase, event: str) -> "Cluster":
        return replace(self, phase=move(PHASE_MOVES, self.phase, target, event, "the cluster"))

    def addressed(self, name: str, incarnation: Incarnation, *states: MemberState) -> Member | None:
        """Return the member of an event; None if the event is about an earlier start or a state already left."""
        member = self.members[name]
        return member if member.incarnation == incarnation and member.state in states else None

    def next_wake_s(self) -> float | None:
        """Return when a Tick is due; None if only other events matter."""
        if self.phase not in (Phase.STARTING, Phase.SERVING):
            return None
        waiting = [member.wake_s for member in self.members.values() if member.state is MemberState.WAITING]
        look_s = self.next_look_s()
        return min([*waiting, *([] if look_s is None else [look_s])], default=None)

    def next_look_s(self) -> float | None:
        """Return when to check silent members; None if there are none.

        Checks are frequent, so that the driver notices when it is suspended.
        """
        patience_ends = [silence.since_s + self.patience_s for _, silence in self.silences()]
        return min([*patience_ends, self.looked_s + LOOK_S]) if patience_ends else None

    def silences(self) -> list[tuple[Member, Silence]]:
        """Return the members whose silence may end them, with it."""
        if self.phase is not Phase.SERVING:
            return []
        states = (MemberState.RUNNING, MemberState.DRAINING)
        found = [(self.addressed(name, silence.incarnation, *states), silence) for name, silence in self.silent.items()]
        return [(member, silence) for member, silence in found if member is not None]
