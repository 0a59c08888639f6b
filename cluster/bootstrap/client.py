"""Client of the bootstrap service: calls, table watches, and the threads that renew leases."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import httpx
import msgspec

from cluster.bootstrap.table import ErrorReply, RefusalCode, TableRefusedError, records_digest
from cluster.spec.errors import BatonError, PeerUnreachableError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import Heartbeat, RankRecord, ReplicaLoad, TableSnapshot

_log = logging.getLogger(__name__)

WATCH_S = 30.0
"""Maximum time for which a watch waits for an urgent change."""
_ANSWER_S = 5.0
"""Maximum time of an answer beyond the wait."""
_RECONNECT_S = 0.5
"""Delay before reconnecting. It is shorter than a lease, so leases survive a restart of the service."""
_NO_VERSION = -1
"""Version of no table: the service answers at once with the whole table.

Asked for at first, and after each error, because a restarted service may number its tables from anywhere.
"""


class BootstrapClient:
    """Connection to the service, for use by one thread.

    Every call raises PeerUnreachableError if the service does not respond in time or fails, and TableRefusedError if
    the table rejects the request.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._http = httpx.Client(base_url=url, headers=_headers(token), trust_env=False)

    def register(self, record: RankRecord) -> None:
        """Register one rank. Idempotent."""
        self._call("PUT", "/ranks", msgspec.json.encode(record))

    def heartbeat(self, beat: Heartbeat) -> bool:
        """Send a leader's heartbeat; return False if the replica's records must be registered again."""
        return self._unless_unknown("/heartbeats", msgspec.json.encode(beat))

    def alive(self, record: RankRecord) -> bool:
        """Renew the lease of a rank other than the leader; return False if its replica is not registered."""
        query = f"incarnation={record.incarnation}&rank={record.global_rank}"
        return self._unless_unknown(f"/replicas/{record.replica}/alive?{query}")

    def unregister(self, replica: ReplicaId, incarnation: Incarnation, reaped: bool) -> None:
        """Remove this incarnation and all earlier ones; ``reaped`` means that their processes are confirmed dead."""
        query = f"incarnation={incarnation}&reaped={str(reaped).lower()}"
        self._call("DELETE", f"/replicas/{replica}?{query}")

    def table(self) -> TableSnapshot:
        snapshot = self.watch(_NO_VERSION, 0.0)
        assert snapshot is not None, "no table has this version"
        return snapshot

    def watch(self, version: int, timeout_s: float) -> TableSnapshot | None:
        """Wait for an urgent change since ``version``; after the timeout, return None if nothing has changed."""
        reply = self._call("GET", _watch_path(version, timeout_s), timeout_s=timeout_s + _ANSWER_S)
        return _snapshot(reply)

    def close(self) -> None:
        self._http.close()

    def _unless_unknown(self, path: str, body: bytes | None = None) -> bool:
        try:
            self._call("POST", path, body)
        except TableRefusedError as error:
            if error.code is RefusalCode.UNKNOWN_RANKS:
                return False
            raise
        return True

    def _call(self, method: str, path: str, body: bytes | None = None, timeout_s: float = _ANSWER_S) -> httpx.Response:
        try:
            reply = self._http.request(method, path, content=body, timeout=timeout_s)
        except httpx.TransportError as exc:
            why = f"the bootstrap service at {self._url} does not respond: {exc or type(exc).__name__}"
            raise PeerUnreachableError(why) from exc
        return _checked(reply)


async def follow_table_async(
    url: str, token: str, poll_s: Callable[[], float] = lambda: WATCH_S
) -> AsyncGenerator[TableSnapshot | None, None]:
    """Yield the table now, after every urgent change, every error and every ``poll_s``; None if it is unchanged.

    Unlike ``follow_table``, yield nothing while the service is unavailable.
    """
    version = _NO_VERSION
    async with httpx.AsyncClient(base_url=url, headers=_headers(token), trust_env=False) as http:
        while True:
            timeout_s = poll_s()
            try:
                reply = await http.get(_watch_path(version, timeout_s), timeout=timeout_s + _ANSWER_S)
                snapshot = _snapshot(_checked(reply))
            except (httpx.TransportError, BatonError) as error:
                _log.info("no table from %s: %s", url, error or type(error).__name__)
                version = _NO_VERSION
                await asyncio.sleep(_RECONNECT_S)
                continue
            if snapshot is not None:
                version = snapshot.version
            yield snapshot


def follow_table(
    watch: Callable[[int, float], TableSnapshot | None],
    poll_s: Callable[[], float],
    on_lost: Callable[[], None] = lambda: None,
) -> Iterator[TableSnapshot | None]:
    """Yield the table now, after every urgent change, every error and every ``poll_s``.

    Yield None if it is unchanged or unavailable.

    Args:
        watch: waits for a table as `BootstrapClient.watch` does.
        poll_s: returns the timeout of the next wait for a change.
        on_lost: called each time that the service does not send a table.
    """
    version = _NO_VERSION
    while True:
        snapshot = None
        try:
            snapshot = watch(version, poll_s())
        except BatonError:  # the service, or something else at its address, did not send a table
            on_lost()
            version = _NO_VERSION
            time.sleep(min(_RECONNECT_S, poll_s()))
        if snapshot is not None:
            version = snapshot.version
        yield snapshot


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _watch_path(version: int, timeout_s: float) -> str:
    return f"/watch?version={version}&timeout_s={timeout_s}"


def _snapshot(reply: httpx.Response) -> TableSnapshot | None:
    if reply.status_code == 204:
        return None
    try:
        return msgspec.json.decode(reply.content, type=TableSnapshot)
    except msgspec.DecodeError as exc:
        raise PeerUnreachableError(f"bootstrap service: the response is not a table: {exc}") from exc


def _checked(reply: httpx.Response) -> httpx.Response:
    """Return the response if it is a success.

    Raises:
        TableRefusedError: the table rejected the request.
        PeerUnreachableError: the service failed, or something else has responded.
        BatonError: the request was invalid.
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


class LeaseRenewer:
    """Thread that renews one rank's lease. If the process is suspended, so is the thread, and the lease expires."""

    def __init__(
        self,
        url: str,
        token: str,
        record: RankRecord,
        interval_s: float,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Prepare the thread. ``on_failure`` gets the error that ends it: TableRefusedError if the table refuses this
        incarnation.
        """
        self._client = BootstrapClient(url, token)
        self._record = record
        self._interval_s = interval_s
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Send the next report immediately. Thread-safe."""
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
            except Exception as error:
                if isinstance(error, TableRefusedError) or not isinstance(error, BatonError):
                    self._on_failure(error)
                    return
                _log.info("%s", error)  # the service is away, or has given up this request
            self._due.wait(self._interval_s)
            self._due.clear()

    def _report(self) -> None:
        self._client.alive(self._record)

    def _leave(self) -> None:
        """Do nothing, because the leader unregisters the replica."""


class ReplicaRegistrar(LeaseRenewer):
    """Threads of a leader: one registers all records and sends heartbeats, another passes new tables to ``on_table``.

    ``load``, ``on_table`` and ``on_failure`` are called from these threads. Heartbeats stop if the table rejects the
    replica because a later incarnation is known or its records are inconsistent.
    """

    def __init__(
        self,
        url: str,
        token: str,
        records: Sequence[RankRecord],
        load: Callable[[], ReplicaLoad],
        on_table: Callable[[TableSnapshot], None],
        interval_s: float,
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__(url, token, records[0], interval_s, on_failure)
        self._records = tuple(records)
        self._digest = records_digest(records)
        self._load = load
        self._on_table = on_table
        # The watcher has its own connection, and ``stop`` does not wait for its last long poll.
        self._watcher = threading.Thread(
            target=self._watch, args=(BootstrapClient(url, token),), name="table-watch", daemon=True
        )

    def start(self) -> None:
        super().start()
        self._watcher.start()

    def _report(self) -> None:
        """Send a heartbeat; register all records first if the service does not know them."""
        if self._client.heartbeat(self._heartbeat()):
            return
        for record in self._records:
            self._client.register(record)
        self._client.heartbeat(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        replica, incarnation = self._record.replica, self._record.incarnation
        return Heartbeat(replica=replica, incarnation=incarnation, records_digest=self._digest, load=self._load())

    def _leave(self) -> None:
        """Unregister the replica, unless the service is unavailable."""
        try:
            self._client.unregister(self._record.replica, self._record.incarnation, reaped=False)
        except PeerUnreachableError:
            _log.info("the bootstrap service is unavailable; the lease of %s will expire", self._record.replica)

    def _watch(self, client: BootstrapClient) -> None:
        try:
            for snapshot in follow_table(client.watch, lambda: WATCH_S):
                if self._stopping.is_set():
                    return
                if snapshot is not None:
                    self._on_table(snapshot)
        except Exception as error:  # a leader that gets no tables must end
            self._on_failure(error)
        finally:
            client.close()
