"""What the supervisor decides: wanted against actual, as a pure function from state and event to state and actions.

Everything that has to run is a member: the bootstrap service, the router, each replica. A member that fails is ended
as a whole and started again, after a wait that doubles. Before the cluster has been up once, a failure ends it all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cluster.spec.ids import Incarnation
from cluster.spec.lifecycle import Moves, move
from cluster.supervisor.orders import Order

NEVER = Incarnation(0)
"""The incarnation of what has not been started yet."""
MAX_BACKOFF_S = 60.0
STABLE_S = 60.0
"""A member that ran this long starts again as if for the first time."""
LOOK_S = 1.0
"""Between two looks at members that are silent."""


class MemberState(StrEnum):
    """Where one member is."""

    WAITING = "waiting"
    """No process; started at ``wake_s``."""
    STARTING = "starting"
    """Processes exist; not of use yet."""
    RUNNING = "running"
    """Of use."""
    DRAINING = "draining"
    """Of use for what it has taken; ends when that has ended."""
    ENDING = "ending"
    """Failed, or drained; its processes are being killed."""
    REMOVED = "removed"
    """No process, and none is wanted."""


MEMBER_MOVES: Moves[MemberState] = {
    MemberState.WAITING: frozenset({MemberState.STARTING, MemberState.REMOVED}),
    MemberState.STARTING: frozenset({MemberState.RUNNING, MemberState.ENDING}),
    MemberState.RUNNING: frozenset({MemberState.DRAINING, MemberState.ENDING}),
    MemberState.DRAINING: frozenset({MemberState.ENDING}),
    MemberState.ENDING: frozenset({MemberState.WAITING, MemberState.REMOVED}),
    MemberState.REMOVED: frozenset({MemberState.WAITING}),
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
    num_failures: int = 0
    """In a row, without a stable run between them."""
    first_error: str = ""
    """Of these failures."""
    is_wanted: bool = True
    """Once it has ended it starts again."""

    def moved(self, target: MemberState, event: str) -> "Member":
        """The same member in another state."""
        return replace(self, state=move(MEMBER_MOVES, self.state, target, event, self.name))


@dataclass(frozen=True, slots=True)
class Silence:
    """Of one start of a member."""

    incarnation: Incarnation
    since_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOrder:
    """An order that is being carried out."""

    number: int
    """Whom to answer."""
    order: Order
    at_work: frozenset[str] = frozenset()
    """Replicas that are being drained, ended or started for it now."""
    todo: tuple[str, ...] = ()
    """Replicas whose turn comes when those have settled."""
    is_waiting: bool = False
    """For the answer to an action."""


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
    """Starts that have ended without a proof: their processes may still write."""
    reaped: Mapping[str, Incarnation] = field(default_factory=dict)
    """Highest incarnation of each member that is proven gone together with all before it."""
    failure: BaseException | None = None
    """What ended the first start."""
    patience_s: float = math.inf
    """Longest time for which a member that runs may be silent."""
    silent: Mapping[str, Silence] = field(default_factory=dict)
    """Members that run and show no life."""
    looked_s: float = 0.0
    """When the latest event came."""
    draining: frozenset[tuple[str, Incarnation]] = frozenset()
    """Starts of replicas that take no new requests, as the rank table shows them."""
    order: OpenOrder | None = None
    """The one that is being carried out."""

    def with_member(self, member: Member) -> "Cluster":
        """The same cluster with one member changed."""
        return replace(self, members={**self.members, member.name: member})

    def moved(self, target: Phase, event: str) -> "Cluster":
        """The same cluster in another phase."""
        return replace(self, phase=move(PHASE_MOVES, self.phase, target, event, "the cluster"))

    def addressed(self, name: str, incarnation: Incarnation, *states: MemberState) -> Member | None:
        """The member an event is about, if it is about its latest start and not overtaken by another event."""
        member = self.members[name]
        return member if member.incarnation == incarnation and member.state in states else None

    def next_wake_s(self) -> float | None:
        """When a Tick is due; None if only other events matter."""
        if self.phase not in (Phase.STARTING, Phase.SERVING):
            return None
        waiting = [member.wake_s for member in self.members.values() if member.state is MemberState.WAITING]
        look_s = self.next_look_s()
        return min([*waiting, *([] if look_s is None else [look_s])], default=None)

    def next_look_s(self) -> float | None:
        """When to look at those who are silent; None while nobody is.

        Often, so that the driver notices when it does not come to it.
        """
        patience_ends = [silence.since_s + self.patience_s for _, silence in self.silences()]
        return min([*patience_ends, self.looked_s + LOOK_S]) if patience_ends else None

    def silences(self) -> list[tuple[Member, Silence]]:
        """The members whose silence may end them, with it."""
        if self.phase is not Phase.SERVING:
            return []
        states = (MemberState.RUNNING, MemberState.DRAINING)
        found = [(self.addressed(name, silence.incarnation, *states), silence) for name, silence in self.silent.items()]
        return [(member, silence) for member, silence in found if member is not None]
