"""Threads of a replica's ranks that report to the bootstrap service; the leader's also reads the table."""

import logging
import threading
from collections.abc import Callable, Sequence

from cluster.bootstrap.client import BootstrapClient, follow_table
from cluster.bootstrap.table import TableRefusedError, rows_digest
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.registry import Heartbeat, RankRow, ReplicaLoad, TableSnapshot

_log = logging.getLogger(__name__)

_WATCH_S = 30.0


class RankKeeper:
    """Thread of one rank. If the process is stopped or its machine is lost, the reports stop too."""

    def __init__(
        self, url: str, token: str, row: RankRow, interval_s: float, on_refused: Callable[[TableRefusedError], None]
    ) -> None:
        """Prepare the thread; it calls ``on_refused``, as its last action, if a later start of the replica is known."""
        self._client = BootstrapClient(url, token)
        self._row = row
        self._interval_s = interval_s
        self._on_refused = on_refused
        self._stopping = threading.Event()
        self._due = threading.Event()
        """Set when the next report should be sent at once."""
        self._thread = threading.Thread(target=self._run, name="alive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Send the next report at once, because something changed that others should know. Thread-safe."""
        self._due.set()

    def stop(self) -> None:
        self._stopping.set()
        self._due.set()
        self._thread.join()
        self._leave()
        self._client.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._report()
            except PeerUnreachableError as error:
                _log.info("%s", error)
            except TableRefusedError as error:
                self._on_refused(error)
                return
            self._due.wait(self._interval_s)
            self._due.clear()

    def _report(self) -> None:
        self._client.alive(self._row)

    def _leave(self) -> None:
        """Do nothing: the leader unregisters the replica."""


class LeaseKeeper(RankKeeper):
    """Threads of a leader: one registers the rows and sends heartbeats, one reports every new table.

    ``load`` and ``on_table`` are called from these threads. A replica that the table refuses (a later start of it
    is known, or its rows do not fit together) stops sending; ``on_refused`` gets the reason.
    """

    def __init__(
        self,
        url: str,
        token: str,
        rows: Sequence[RankRow],
        load: Callable[[], ReplicaLoad],
        on_table: Callable[[TableSnapshot], None],
        interval_s: float,
        on_refused: Callable[[TableRefusedError], None],
    ) -> None:
        super().__init__(url, token, rows[0], interval_s, on_refused)
        self._rows = tuple(rows)
        self._digest = rows_digest(rows)
        self._load = load
        self._on_table = on_table
        # It has a connection of its own, and nobody waits for its last long poll.
        self._watcher = threading.Thread(
            target=self._watch, args=(BootstrapClient(url, token),), name="table-watch", daemon=True
        )

    def start(self) -> None:
        super().start()
        self._watcher.start()

    def _report(self) -> None:
        """Send one heartbeat; if the service does not know the rows, register all of them first."""
        if self._client.heartbeat(self._heartbeat()):
            return
        for row in self._rows:
            self._client.register(row)
        self._client.heartbeat(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        replica, incarnation = self._row.replica, self._row.incarnation
        return Heartbeat(replica=replica, incarnation=incarnation, rows_digest=self._digest, load=self._load())

    def _leave(self) -> None:
        """Unregister, unless the service is unavailable."""
        try:
            self._client.unregister(self._row.replica, self._row.incarnation, reaped=False)
        except PeerUnreachableError:
            _log.info("the bootstrap service is away; the lease of %s will run out", self._row.replica)

    def _watch(self, client: BootstrapClient) -> None:
        for snapshot in follow_table(client.watch, lambda: _WATCH_S):
            if self._stopping.is_set():
                client.close()
                return
            if snapshot is not None:
                self._on_table(snapshot)
