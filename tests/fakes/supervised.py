"""Supervisor state with its own clock, for tests that handle event after event."""

from collections.abc import Iterable

from cluster.spec.errors import BatonError
from cluster.spec.ids import Incarnation
from cluster.supervisor.commands import OperatorCommand
from cluster.supervisor.events import Action, CommandReceived, Event, Failed, Report, Started, Tick
from cluster.supervisor.reconcile import reconcile
from cluster.supervisor.state import Cluster, ClusterPhase, Member, MemberState, Now

NAMES = ("bootstrap", "router", "prefill-0", "decode-0")
UNIX_MS = 1_000_000
PATIENCE_S = 7.0
ERROR = BatonError("rank 1: no memory")


class Run:
    def __init__(self, names: Iterable[str] = NAMES) -> None:
        self.cluster = Cluster(
            members={name: Member(name=name) for name in names}, backoff_s=1.0, patience_s=PATIENCE_S
        )
        self.now_s = 0.0
        self._num_commands = 0

    def step(self, event: Event) -> list[Action]:
        """Handle one event. Return the actions without the lines for the user."""
        now = Now(s=self.now_s, unix_ms=UNIX_MS + int(self.now_s * 1000))
        self.cluster, actions = reconcile(self.cluster, event, now)
        self.lines = [action.line for action in actions if isinstance(action, Report)]
        return [action for action in actions if not isinstance(action, Report)]

    def incarnation(self, name: str) -> Incarnation:
        return self.cluster.members[name].incarnation

    def state(self, name: str) -> MemberState:
        return self.cluster.members[name].state

    def serve(self) -> "Run":
        self.step(Tick())
        for name in self.cluster.members:
            self.step(Started(name, self.incarnation(name)))
        assert self.cluster.phase is ClusterPhase.SERVING
        return self

    def command(self, command: OperatorCommand) -> list[Action]:
        self._num_commands += 1
        return self.step(CommandReceived(self._num_commands, command))

    def fail(self, name: str) -> list[Action]:
        return self.step(Failed(name, self.incarnation(name), ERROR))
