"""Client of the bootstrap service: calls, and watches on the table."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator

import httpx
import msgspec

from cluster.bootstrap.table import ErrorReply, RefusalCode, TableRefusedError
from cluster.spec.errors import BatonError, PeerUnreachableError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import Heartbeat, RankRow, TableSnapshot

_log = logging.getLogger(__name__)

_WATCH_S = 30.0
_RECONNECT_S = 0.5
"""Wait before reconnecting, shorter than a lease, so that a restart of the service costs no leases."""


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
        at = row.coords
        self._call("PUT", f"/replicas/{row.replica}/ranks/{at.dp}/{at.cp}/{at.tp}/{at.pp}", msgspec.json.encode(row))

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

    def table(self) -> TableSnapshot:
        return msgspec.json.decode(self._call("GET", "/table").content, type=TableSnapshot)

    def watch(self, version: int, timeout_s: float) -> TableSnapshot | None:
        """Return the table once its version differs; None if nothing changes in time."""
        reply = self._call("GET", _watch_path(version, timeout_s), timeout_s=timeout_s + self._timeout_s)
        return _snapshot(reply)

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
    version = -1
    async with httpx.AsyncClient(base_url=url, headers=_headers(token), timeout=_WATCH_S + 5, trust_env=False) as http:
        while True:
            try:
                snapshot = _snapshot(_checked(await http.get(_watch_path(version, _WATCH_S))))
            except (httpx.TransportError, BatonError) as error:
                _log.info("no table from %s: %s", url, error or type(error).__name__)
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
    """Yield the table now and after every change, and None when nothing changes in time or the service is unavailable.

    Args:
        watch: see BootstrapClient.watch.
        poll_s: longest wait for the next change.
        on_lost: called each time that the service gives no table; when it does again, there is a new one.
    """
    version = -1
    while True:
        snapshot = None
        try:
            snapshot = watch(version, poll_s())
        except BatonError:  # the service is unavailable, or responds with something else
            on_lost()
            version = -1
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
        raise PeerUnreachableError(f"bootstrap service: its answer is not a table: {exc}") from exc


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
