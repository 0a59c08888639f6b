"""Simulated bootstrap service: the real table behind calls that take time and can fail."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.bootstrap.table import BootstrapTable, TableRefusedError
from cluster.simulator.environment import HOME, Environment
from cluster.spec.clock import LEASE_S
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.registry import TableSnapshot

_POLL_S = 0.5
"""Interval between lease checks, and between attempts to reach a disconnected watcher."""

Answer = Callable[[TableRefusedError | PeerUnreachableError | None], None]
OnTable = Callable[[TableSnapshot], None]


@dataclass(slots=True, eq=False)
class _Watcher:
    machine: str
    on_table: OnTable
    seen_version: int = -1
    is_due: bool = False


class Bootstrap:
    """Bootstrap service that can die and restarts with an empty table."""

    def __init__(self, env: Environment) -> None:
        self.table: BootstrapTable | None = None
        """Current table; None while the service is down."""
        self._env = env
        self._watchers: list[_Watcher] = []
        self._snapshot: TableSnapshot | None = None
        env.after(_POLL_S, self._poll)

    def start(self) -> None:
        """Serve a new table. As in the real service, its version numbers begin at the current time."""
        self.table = BootstrapTable(LEASE_S, first_version=int(self._env.now_s() * 1000) + 1)
        self._announce()

    def kill(self) -> None:
        self.table = None

    def call(self, machine: str, request: Callable[[BootstrapTable], None], on_answer: Answer) -> None:
        """Call the table from a machine. ``on_answer`` gets None or the error."""
        self._env.after(self._delay_s(machine), partial(self._serve, machine, request, on_answer))

    def watch(self, machine: str, on_table: OnTable) -> Callable[[], None]:
        """Call ``on_table`` with new tables. Return a function that ends the watch."""
        watcher = _Watcher(machine, on_table)
        self._watchers.append(watcher)
        self._make_due(watcher)
        return partial(self._watchers.remove, watcher)

    def _serve(self, machine: str, request: Callable[[BootstrapTable], None], on_answer: Answer) -> None:
        answer: TableRefusedError | PeerUnreachableError | None = None
        if self.table is None or self._env.network.is_partitioned(machine, HOME):
            answer = PeerUnreachableError("the bootstrap service does not respond")
        else:
            try:
                request(self.table)
            except TableRefusedError as error:
                answer = error
            self._announce()
        self._env.after(self._delay_s(machine), partial(on_answer, answer))

    def _poll(self) -> None:
        if self.table is not None:
            self.table.expire(self._env.now_s())
            self._announce()
        self._env.after(_POLL_S, self._poll)

    def _announce(self) -> None:
        for watcher in self._watchers:
            if self.table is not None and watcher.seen_version != self.table.version:
                self._make_due(watcher)

    def _make_due(self, watcher: _Watcher) -> None:
        if not watcher.is_due:
            watcher.is_due = True
            self._env.after(self._delay_s(watcher.machine), partial(self._show, watcher))

    def _show(self, watcher: _Watcher) -> None:
        if watcher not in self._watchers:
            return
        if self.table is None or self._env.network.is_partitioned(watcher.machine, HOME):
            self._env.after(_POLL_S, partial(self._show, watcher))
            return
        watcher.is_due = False
        if watcher.seen_version != self.table.version:
            snapshot = self._newest(self.table)
            watcher.seen_version = snapshot.version
            watcher.on_table(snapshot)

    def _newest(self, table: BootstrapTable) -> TableSnapshot:
        if self._snapshot is None or self._snapshot.version != table.version:
            self._snapshot = table.snapshot(self._env.now_s())
        return self._snapshot

    def _delay_s(self, machine: str) -> float:
        return self._env.network.delay_s(machine != HOME)
