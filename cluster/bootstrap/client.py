"""Client of the bootstrap service: calls, a watch on the table, and a leader's lease."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

import httpx
import msgspec

from cluster.bootstrap.replies import ErrorReply, TableReply
from cluster.bootstrap.table import RefusalCode, TableRefusedError, rows_digest
from cluster.spec.errors import BatonError, PeerUnreachableError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import Heartbeat, RankCoords, RankRow, ReplicaLoad, TableSnapshot

_log = logging.getLogger(__name__)

_WATCH_S = 30.0
_RECONNECT_S, _MOST_RECONNECT_S = 0.5, 2.0
"""First and longest wait before reconnecting; the wait doubles. Shorter than a lease, so that a restart of the service
costs no leases.
"""

Reply = TypeVar("Reply")


class BootstrapClient:
    """Connection of one thread to the service.

    Every call raises PeerUnreachableError when the service does not respond in time or responds with an error, and
    TableRefusedError when the table refuses.
    """

    def __init__(self, url: str, token: str, timeout_s: float = 5.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._http = httpx.Client(base_url=url, headers=_headers(token), timeout=timeout_s, trust_env=False)

    def register(self, row: RankRow) -> None:
        """Add one rank. Idempotent."""
        self._call("PUT", _row_path(row.replica, row.coords), msgspec.json.encode(row))

    def heartbeat(self, beat: Heartbeat) -> bool:
        """Renew a replica's lease; False when the service does not know these rows and needs all of them again."""
        return self._unless_unknown("POST", f"/replicas/{beat.replica}/heartbeat", msgspec.json.encode(beat))

    def alive(self, row: RankRow) -> bool:
        """Renew the lease of one rank other than the leader; False when its replica is not registered."""
        query = f"incarnation={row.incarnation}&rank={row.global_rank}"
        return self._unless_unknown("POST", f"/replicas/{row.replica}/alive?{query}")

    def unregister(self, replica: ReplicaId, incarnation: Incarnation, reaped: bool) -> None:
        """Forget this start of a replica and all before it; with ``reaped``, their processes are proven gone."""
        query = f"incarnation={incarnation}&reaped={str(reaped).lower()}"
        self._call("DELETE", f"/replicas/{replica}?{query}")

    def lookup(self, replica: ReplicaId, coords: RankCoords) -> RankRow:
        """Return one row."""
        return msgspec.json.decode(self._call("GET", _row_path(replica, coords)).content, type=RankRow)

    def table(self) -> TableSnapshot:
        """Return the whole table."""
        return msgspec.json.decode(self._call("GET", "/table").content, type=TableReply).snapshot

    def watch(self, version: int, timeout_s: float) -> TableSnapshot | None:
        """Return the table once its version differs; None if nothing changes in time."""
        reply = self._call("GET", _watch_path(version, timeout_s), timeout_s=timeout_s + self._timeout_s)
        return _snapshot(reply)

    def request_stop(self) -> None:
        """Ask the whole cluster to drain and stop."""
        self._call("POST", "/stop")

    def close(self) -> None:
        self._http.close()

    def _unless_unknown(self, method: str, path: str, body: bytes | None = None) -> bool:
        try:
            self._call(method, path, body)
        except TableRefusedError as error:
            if error.code is RefusalCode.UNKNOWN_ROWS:
                return False
            raise
        return True

    def _call(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        try:
            reply = self._http.request(method, path, content=body, timeout=timeout_s or self._timeout_s)
        except httpx.TransportError as exc:
            raise _unreachable(self._url, exc) from exc
        return _checked(reply)


async def watch_table(url: str, token: str) -> AsyncGenerator[TableSnapshot, None]:
    """Yield the table now and after every change; waits while the service is unavailable."""
    version, wait_s = -1, _RECONNECT_S
    async with httpx.AsyncClient(base_url=url, headers=_headers(token), timeout=_WATCH_S + 5, trust_env=False) as http:
        while True:
            try:
                snapshot = _snapshot(_checked(await http.get(_watch_path(version, _WATCH_S))))
            except (httpx.TransportError, BatonError) as error:
                _log.info("no table from %s: %s", url, error or type(error).__name__)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _MOST_RECONNECT_S)
                continue
            wait_s = _RECONNECT_S
            if snapshot is not None:
                version = snapshot.version
                yield snapshot


class LeaseKeeper:
    """Two threads of a leader: one registers the rows and sends heartbeats, one reports every new table.

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
        on_refused: Callable[[TableRefusedError], None] = lambda error: _log.error("%s", error),
    ) -> None:
        assert rows, "a replica has rows"
        self._url, self._token = url, token
        self._client = BootstrapClient(url, token)
        self._rows = tuple(rows)
        self._digest = rows_digest(rows)
        self._load = load
        self._on_table = on_table
        self._on_refused = on_refused
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._due = threading.Event()
        """Set when the next heartbeat should be sent at once."""
        self._beats = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._watcher = _TableWatcher(url, token, on_table)

    def start(self) -> None:
        """Start the threads; returns at once."""
        self._beats.start()
        self._watcher.start()

    def hurry(self) -> None:
        """Send the next heartbeat at once, because something changed that others should know. Thread-safe."""
        self._due.set()

    def stop(self, unregister: bool) -> None:
        """Stop both threads and, if asked, unregister; does not wait for a service that is unavailable."""
        self._stopping.set()
        self._due.set()
        self._watcher.stop()
        self._beats.join()
        try:
            if unregister:
                self._client.unregister(self._rows[0].replica, self._rows[0].incarnation, reaped=False)
        except PeerUnreachableError:
            _log.info("the bootstrap service is away; the lease of %s will run out", self._rows[0].replica)
        finally:
            self._client.close()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            try:
                self._beat()
            except PeerUnreachableError as error:
                _log.info("%s", error)
            except TableRefusedError as error:
                self._on_refused(error)
                return
            self._due.wait(self._interval_s)
            self._due.clear()

    def _beat(self) -> None:
        """Send one heartbeat; if the service does not know the rows, register all of them first."""
        if self._client.heartbeat(self._heartbeat()):
            return
        for row in self._rows:
            self._client.register(row)
        self._client.heartbeat(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        first = self._rows[0]
        return Heartbeat(
            replica=first.replica, incarnation=first.incarnation, rows_digest=self._digest, load=self._load()
        )


class _TableWatcher:
    """Runs ``watch_table`` in a thread; stopping does not wait for the current long poll."""

    def __init__(self, url: str, token: str, on_table: Callable[[TableSnapshot], None]) -> None:
        self._url, self._token, self._on_table = url, token, on_table
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="table-watch", daemon=True)

    def start(self) -> None:
        self._task = self._loop.create_task(self._watch())
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _watch(self) -> None:
        async with contextlib.aclosing(watch_table(self._url, self._token)) as snapshots:
            async for snapshot in snapshots:
                self._on_table(snapshot)


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _row_path(replica: ReplicaId, coords: RankCoords) -> str:
    return f"/replicas/{replica}/ranks/{coords.dp}/{coords.cp}/{coords.tp}/{coords.pp}"


def _watch_path(version: int, timeout_s: float) -> str:
    return f"/watch?version={version}&timeout_s={timeout_s}"


def _snapshot(reply: httpx.Response) -> TableSnapshot | None:
    if reply.status_code == 204:
        return None
    try:
        return msgspec.json.decode(reply.content, type=TableSnapshot)
    except msgspec.DecodeError as exc:
        raise PeerUnreachableError(f"bootstrap service: its answer is no table: {exc}") from exc


def _unreachable(url: str, exc: httpx.TransportError) -> PeerUnreachableError:
    return PeerUnreachableError(f"the bootstrap service at {url} does not answer: {exc or type(exc).__name__}")


def _checked(reply: httpx.Response) -> httpx.Response:
    """Return the response if it is a success.

    Raises:
        TableRefusedError: the table refused.
        PeerUnreachableError: the responder is not the service, or the service failed.
        BatonError: the request was invalid before it reached the table.
    """
    if reply.is_success:
        return reply
    try:
        error = msgspec.json.decode(reply.content, type=ErrorReply).error
    except msgspec.DecodeError:
        raise PeerUnreachableError(f"bootstrap service: status {reply.status_code}: {reply.text[:200]}") from None
    if error.code in set(RefusalCode):
        raise TableRefusedError(RefusalCode(error.code), error.message)
    raise BatonError(f"bootstrap service: {error.message}")
