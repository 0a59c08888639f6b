"""HTTP service of the rank table, with JSON bodies. Every route except /health requires a bearer token.

The table's rules are in table.py.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Annotated, Any, TypeVar

import msgspec
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Scope

from cluster.bootstrap.table import BootstrapTable, ErrorDetail, ErrorReply, TableRefusedError, WatchedTable
from cluster.http.connection import BoundedHttpProtocol
from cluster.http.crowd import handles_of
from cluster.http.reader import read_in_turn
from cluster.http.refusal import Refusal
from cluster.spec.clock import LEASE_S, Clock, SystemClock
from cluster.spec.errors import UserError
from cluster.spec.ids import Incarnation, ReplicaId, is_router, parse_replica_id
from cluster.spec.registry import Heartbeat, RankRecord

MAX_WATCH_S = 60.0
MAX_BODY_BYTES = 1 << 20
"""Maximum body size. A record or a heartbeat takes a few thousand bytes."""

_KEEP_ALIVE_S = 120
"""Keep-alive timeout of connections, longer than any pause between a client's requests."""
_START_TIMEOUT_S = 20.0
_CODES = {400: "bad_request", 401: "unauthorized", 404: "not_found"}

Body = TypeVar("Body")
Number = Annotated[int, Query(ge=0, lt=1 << 63)]
"""Integer in the range that messages can encode."""


def create_app(table: BootstrapTable, token: str, clock: Clock) -> FastAPI:
    """Create the HTTP application; ``app.state.watched`` is its WatchedTable."""
    app = FastAPI(title="Baton bootstrap", openapi_url=None)
    app.state.watched = watched = WatchedTable(table, clock)
    app.add_exception_handler(TableRefusedError, _refused)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(ClientDisconnect, _left)
    app.include_router(_routes(watched), dependencies=[Depends(_bearer(token))])

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    return app


class BootstrapServer:
    """Bootstrap service in a thread of its own."""

    def __init__(self, host: str, port: int, token: str, lease_s: float = LEASE_S) -> None:
        self._host = host
        self._port = port
        # Versions start at the clock's time, so that they keep growing across restarts.
        table = BootstrapTable(lease_s, first_version=int(time.time() * 1000))
        self._server = _Server(create_app(table, token, SystemClock()), _authorization(token))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Start serving; return the base URL. Port 0 picks a free port.

        Raises:
            UserError: the service cannot listen on the address.
        """
        listener = _listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, args=[listener], name="bootstrap", daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert self._server.started, "the bootstrap service did not start"
        return f"http://{self._host}:{self._port}"

    def run(self) -> None:
        self._stopped.wait()

    def stop(self) -> None:
        """End all watches and stop; safe to call twice."""
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join()

    def _serve(self, listener: socket.socket) -> None:
        try:
            self._server.run(sockets=handles_of(listener))
        finally:
            listener.close()
            self._stopped.set()


class BootstrapProtocol(BoundedHttpProtocol):
    """Connection of the service's client."""

    body_s = 10.0
    authorization = b""
    """Header of clients that hold the token."""
    _is_member = False
    """True once the client has shown the token. Then it does not wait behind strangers at the same address."""

    @property
    def address(self) -> Hashable:
        return super().address, self._is_member

    def client_of(self, scope: Scope) -> Hashable:
        """Return the address, and whether the client has shown the token."""
        del scope
        return self.address

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        given = next((value for name, value in cycle.scope.get("headers", ()) if name == b"authorization"), b"")
        self._is_member = self._is_member or secrets.compare_digest(given, self.authorization)
        super()._start_asgi_task(cycle, app)

    def refused(self, refusal: Refusal) -> ASGIApp:
        """Return the application that answers a refused request."""
        return _error(refusal.status, refusal.code, str(refusal))


class _Server(uvicorn.Server):
    """HTTP server that ends all watches before it waits for open requests."""

    def __init__(self, app: FastAPI, authorization: bytes) -> None:
        self._watched: WatchedTable = app.state.watched
        super().__init__(
            uvicorn.Config(
                app,
                http=read_in_turn(
                    type(BootstrapProtocol.__name__, (BootstrapProtocol,), {"authorization": authorization})
                ),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        """Look at the leases. Uvicorn calls this ten times a second, so a longer gap is the loop's own lag."""
        self._watched.look()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watched.close()
        await super().shutdown(sockets)


def _routes(watched: WatchedTable) -> APIRouter:
    routes = APIRouter()
    table = watched.table

    def changed() -> Response:
        watched.wake_if_changed()
        return Response(status_code=204)

    @routes.put("/ranks")
    async def register(request: Request) -> Response:
        table.register(await _decode(request, RankRecord))
        return changed()

    @routes.post("/heartbeats")
    async def heartbeat(request: Request) -> Response:
        table.heartbeat(await _decode(request, Heartbeat), watched.now_s())
        return changed()

    @routes.post("/replicas/{replica}/alive")
    async def alive(replica: str, incarnation: Number, rank: Number) -> Response:
        table.alive(ReplicaId(replica), Incarnation(incarnation), rank, watched.now_s())
        return changed()

    @routes.delete("/replicas/{replica}")
    async def unregister(replica: str, incarnation: Number, reaped: bool = False) -> Response:
        table.unregister(_member(replica), Incarnation(incarnation), reaped=reaped)
        return changed()

    @routes.get("/watch")
    async def watch(version: int, timeout_s: Annotated[float, Query(ge=0, le=MAX_WATCH_S)] = 30.0) -> Response:
        snapshot = await watched.watch(version, timeout_s)
        return Response(status_code=204) if snapshot is None else _json(snapshot)

    return routes


def _authorization(token: str) -> bytes:
    return f"Bearer {token}".encode()


def _bearer(token: str) -> Callable[[Request], Awaitable[None]]:
    expected = _authorization(token)

    async def check(request: Request) -> None:
        if not secrets.compare_digest(request.headers.get("authorization", "").encode(), expected):
            raise HTTPException(401, "wrong or missing bearer token in the Authorization header")

    return check


def _member(text: str) -> ReplicaId:
    """Parse the name of a replica or a router process. Routers have no records, but can be reported as ended."""
    try:
        return ReplicaId(text) if is_router(text) else parse_replica_id(text)
    except ValueError as exc:
        raise HTTPException(400, str(exc)) from exc


async def _decode(request: Request, kind: type[Body]) -> Body:
    received = bytearray()
    _check_size(int(request.headers.get("content-length", 0)))
    async for part in request.stream():
        received += part
        _check_size(len(received))
    return decode_body(bytes(received), kind)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Decode the struct in a body. Raises HTTPException 400."""
    try:
        struct = msgspec.json.decode(body, type=kind)
        msgspec.msgpack.encode(struct)  # JSON allows larger numbers than messages can encode
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as exc:
        raise HTTPException(400, f"the body is not a {kind.__name__}: {exc}") from exc
    return struct


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as exc:
        raise UserError(f"bootstrap service: cannot listen on {host}:{port}: {os.strerror(exc.errno or 0)}") from exc


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _error(status: int, code: str, message: str) -> Response:
    body = ErrorReply(error=ErrorDetail(code=code, message=message))
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, TableRefusedError)
    return _error(409, error.code, str(error))


async def _left(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClientDisconnect)
    return _error(408, "client_left", "the client left")  # sent to nobody


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return _error(error.status_code, _CODES.get(error.status_code, "refused"), str(error.detail))


async def _bad_parameter(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = [f"{part['loc'][-1]}: {part['msg']}, got {part.get('input')!r}" for part in error.errors()]
    return _error(400, "bad_request", "; ".join(parts))
