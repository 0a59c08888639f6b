"""Simulated bootstrap service: the real table with its real clock, behind calls that take time and can fail."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.bootstrap.table import LAG_S, BootstrapTable, TableRefusedError, WatchedTable
from cluster.simulator.environment import HOME, Environment, Loop
from cluster.spec.clock import LEASE_S
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.registry import TableSnapshot

_POLL_S = 0.5
"""Interval between attempts to reach a disconnected watcher."""
_CALL_TIMEOUT_S = 5.0
_CATCH_UP_S = 0.3
"""Maximum time until a service that was stalled has read a request that arrived meanwhile."""

Answer = Callable[[TableRefusedError | PeerUnreachableError | None], None]
OnTable = Callable[[TableSnapshot], None]
Request = Callable[[BootstrapTable, float], None]


@dataclass(slots=True, eq=False)
class _Watcher:
    machine: str
    watch_s: float
    on_table: OnTable
    seen_version: int = -1
    is_due: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    machine: str
    request: Request
    on_answer: Answer
    is_answered: bool = False


class Bootstrap:
    """Bootstrap service that can die and restarts with an empty table, and whose loop can stall."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._watched: WatchedTable | None = None
        """Current table; None while the service is down."""
        self._loop = Loop()
        self._watchers: list[_Watcher] = []

    def start(self) -> None:
        """Serve a new table. As in the real service, its version numbers begin at the current time."""
        table = BootstrapTable(LEASE_S, first_version=int(self._env.now_s() * 1000) + 1)
        self._watched, self._loop = WatchedTable(table, self._env.event_queue), Loop()
        self._look(self._watched)

    def kill(self) -> None:
        self._watched = None

    def stall(self) -> Callable[[], None]:
        """Freeze the service; return a function that lets it catch up."""
        loop = self._loop
        loop.freeze()
        return loop.thaw

    def snapshot(self) -> TableSnapshot | None:
        """Return the table; None while the service does not answer."""
        if self._watched is None or self._loop.is_frozen:
            return None
        return self._watched.table.snapshot(self._watched.now_s())

    def call(self, machine: str, request: Request, on_answer: Answer) -> None:
        """Call the table from a machine. ``on_answer`` gets None or the error."""
        self._env.after(self._delay_s(machine), partial(self._arrive, _Call(machine, request, on_answer)))

    def watch(self, machine: str, watch_s: float, on_table: OnTable) -> Callable[[], None]:
        """Call ``on_table`` after urgent changes, and after others every ``watch_s``; return a function to end it."""
        watcher = _Watcher(machine, watch_s, on_table)
        self._watchers.append(watcher)
        self._poll(watcher)
        return partial(self._watchers.remove, watcher)

    def _poll(self, watcher: _Watcher) -> None:
        if watcher in self._watchers:
            self._make_due(watcher)
            self._env.after(watcher.watch_s, partial(self._poll, watcher))

    def _arrive(self, call: _Call) -> None:
        if self._watched is None or self._env.network.is_cut(call.machine, HOME):
            self._answer(call, PeerUnreachableError("the bootstrap service does not respond"))
        elif self._loop.is_frozen:
            watched = self._watched
            delay_s = self._env.random.uniform(0, _CATCH_UP_S)
            self._loop.run(lambda: self._env.after(delay_s, partial(self._serve, call, watched)))
            error = PeerUnreachableError("the bootstrap service did not respond in time")
            self._env.after(_CALL_TIMEOUT_S, partial(self._answer, call, error))
        else:
            self._serve(call, self._watched)

    def _serve(self, call: _Call, watched: WatchedTable) -> None:
        if watched is not self._watched:
            return
        answer: TableRefusedError | PeerUnreachableError | None = None
        try:
            call.request(watched.table, watched.now_s())
        except TableRefusedError as error:
            answer = error
        self._announce()
        if self._env.network.is_cut(HOME, call.machine):
            answer = PeerUnreachableError("the answer of the bootstrap service was lost")
        self._answer(call, answer)

    def _answer(self, call: _Call, answer: TableRefusedError | PeerUnreachableError | None) -> None:
        if not call.is_answered:
            call.is_answered = True
            self._env.after(self._delay_s(call.machine), partial(call.on_answer, answer))

    def _look(self, watched: WatchedTable) -> None:
        if watched is self._watched:
            watched.look()
            self._announce()
            self._env.after(LAG_S / 2, partial(self._loop.run, partial(self._look, watched)))

    def _announce(self) -> None:
        for watcher in self._watchers:
            if self._watched is not None and self._watched.table.is_outdated(watcher.seen_version):
                self._make_due(watcher)

    def _make_due(self, watcher: _Watcher) -> None:
        if not watcher.is_due:
            watcher.is_due = True
            self._env.after(self._delay_s(watcher.machine), partial(self._show, watcher))

    def _show(self, watcher: _Watcher) -> None:
        if watcher not in self._watchers:
            return
        snapshot = self.snapshot()
        if snapshot is None or self._env.network.is_partitioned(watcher.machine, HOME):
            self._env.after(_POLL_S, partial(self._show, watcher))
            return
        watcher.is_due = False
        if watcher.seen_version != snapshot.version:
            watcher.seen_version = snapshot.version
            watcher.on_table(snapshot)

    def _delay_s(self, machine: str) -> float:
        return self._env.network.delay_s(machine != HOME)
