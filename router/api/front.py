"""First steps in handling an HTTP request: its id, API key, headers and body."""

import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from fastapi import Depends
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.connection import ARRIVED_KEY
from cluster.http.refusal import REFUSAL_KEY, Refusal
from cluster.spec.config import DeployConfig
from router.api.errors import EXPECTED_ERRORS, answer_error
from router.api_keys import ApiKey
from router.connection import given_key, unless_client_leaves
from router.errors import ApiError, bad_request
from router.preprocess.body import Body, parse, shortened
from router.preprocess.job import Job, JsonText, Preprocessed, Route
from router.preprocess.preprocessor import MAX_SESSION_CHARS
from router.records import TRACEPARENT
from router.request import ANYBODY
from router.service import Service

Handler = Callable[[Request], Awaitable[Response]]

REQUEST_ID = "x-request-id"
_ID_HEADER = REQUEST_ID.encode()
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ARRIVAL_KEY = "baton.arrival"
_SESSION_HEADER = b"x-session-id"
_DP_RANK_HEADER = "X-data-parallel-rank"
_ENCODING_HEADER, _LENGTH_HEADER = b"content-encoding", b"content-length"
_READ_HEADERS = frozenset(
    (
        _ID_HEADER,
        _SESSION_HEADER,
        _DP_RANK_HEADER.lower().encode(),
        _ENCODING_HEADER,
        _LENGTH_HEADER,
        TRACEPARENT.encode(),
    )
)
_HELD_KEY = "baton.held"
_MOST_LARGEST = 8
"""Maximum memory for large bodies, as a multiple of the maximum body size."""


class Arrival(msgspec.Struct, kw_only=True):
    """Facts known once the head of an HTTP request has arrived."""

    request_id: str
    arrived_s: float
    headers: Mapping[bytes, bytes]
    """The headers that are read later; others may be large."""
    caller: ApiKey | None = None
    """Known API key that the request carries; None if no keys are configured."""
    tenant: str = ANYBODY
    """Name of the tenant that sends the request: of the API key, if keys are configured."""
    weight: float = 1.0
    """Share of the tenant, relative to others."""

    def header(self, name: bytes) -> str | None:
        """Return the first header with this lowercase name."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


def arrival_of(request: Request) -> Arrival:
    arrival: Arrival = request.scope[_ARRIVAL_KEY]
    return arrival


class Front:
    """ASGI application around FastAPI that gives every request an id and calls the busiest handlers directly.

    The id is the client's ``X-Request-Id`` if it is valid, or else a new one. FastAPI would take longer than the
    handlers themselves.
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler], service: Service) -> None:
        """Wrap ``app``; ``handlers`` maps paths of POST routes to their handlers."""
        self._app = app
        self._handlers = handlers
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in reversed(scope["headers"]) if name in _READ_HEADERS}
        arrival = Arrival(request_id="", arrived_s=scope[ARRIVED_KEY], headers=headers)
        given = arrival.header(_ID_HEADER) or ""
        arrival.request_id = given if _VALID_ID.fullmatch(given) else secrets.token_hex(16)
        scope[_ARRIVAL_KEY] = arrival
        has_begun = False

        # Not async, because it is called for every token.
        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message.get("headers", ()), (_ID_HEADER, arrival.request_id.encode())]
            return send(message)

        handler = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
        if handler is None:
            await self._app(scope, receive, send_with_id)
            return
        scope["app"] = self._app
        request = Request(scope, receive)
        try:
            check_key(self._service, request)
            response = await handler(request)
            await response(scope, receive, send_with_id)
        except Exception as error:
            if has_begun:
                raise
            await answer_error(self._service.metrics, request, error)(scope, receive, send_with_id)
            if not isinstance(error, EXPECTED_ERRORS):
                raise  # for the log


class Bodies:
    """Receives the bodies of one process's requests, with limits on size and total memory.

    A tenant's bodies may take as much memory as is free (Choudhury and Hahne, "Dynamic Queue Length Thresholds for
    Shared-Memory Packet Switches", 1998): half of all if they are alone, and some is always left for another tenant.
    """

    def __init__(self, max_bytes: int) -> None:
        """Create the receiver; ``max_bytes`` is the maximum size of one body."""
        self._max_bytes = max_bytes
        self._held = Counter[str]()
        """Number of bytes by tenant, of bodies that do not arrive together with their heads."""

    async def receive(self, request: Request) -> bytes:
        """Return a request's body, most of which usually arrives together with the head. Follow with ``release``.

        Raises:
            ApiError: 413 for a body that is too large, 415 for a compressed one, 503 if the tenant's bodies take too
                much memory, or the refusal of the connection, such as 408 for a slow body.
            ClientDisconnect: the client left before the end of the body.
        """
        if encoding := arrival_of(request).header(_ENCODING_HEADER):
            message = f"content-encoding: got {shortened(repr(encoding))}; allowed: none"
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_encoding")
        declared = arrival_of(request).header(_LENGTH_HEADER)
        if declared is not None:
            self._check(int(declared))  # the parser has accepted the number
        first = await request.receive()
        self._check(len(body := _body_of(first, request)))
        return await self._receive_rest(request, body) if first.get("more_body", False) else body

    async def _receive_rest(self, request: Request, first: bytes) -> bytes:
        parts = [first]
        self._hold(request, len(first))
        has_more = True
        while has_more:
            event = await request.receive()
            parts.append(_body_of(event, request))
            self._hold(request, len(parts[-1]))
            has_more = event.get("more_body", False)
        return b"".join(parts)

    def release(self, request: Request) -> None:
        """Free a request's share of the memory, when its body has been read or refused."""
        if num_bytes := request.scope.pop(_HELD_KEY, 0):
            tenant = arrival_of(request).tenant
            self._held[tenant] -= num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    def _hold(self, request: Request, num_bytes: int) -> None:
        tenant = arrival_of(request).tenant
        self._held[tenant] += num_bytes
        request.scope[_HELD_KEY] = held = request.scope.get(_HELD_KEY, 0) + num_bytes
        self._check(held)
        own = self._held[tenant]
        most = (_MOST_LARGEST * self._max_bytes - (self._held.total() - own)) // 2
        if own > most:
            message = f"the bodies of this key's requests take {own} bytes; allowed: {most} now; try again"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="bodies_too_large")

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            message = f"the body is larger than {self._max_bytes} bytes"
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")


Read = TypeVar("Read", bound=Body)


async def read(request: Request, schema: type[Read]) -> Read:
    """Receive and validate a short body.

    Raises:
        ApiError: 400 naming the first wrong field, or any error of ``Bodies.receive``.
        ClientDisconnect: the client left before the end of the body.
    """
    bodies: Bodies = request.app.state.bodies
    try:
        return parse(await bodies.receive(request), schema)
    finally:
        bodies.release(request)


async def preprocess(service: Service, http: Request, route: Route) -> Preprocessed | JsonText:
    """Receive a request's body and preprocess it.

    Raises:
        ApiError: the body is wrong, the client has left, or any error of ``Bodies.receive``.
        ClientDisconnect: the client left before the end of the body.
    """
    bodies: Bodies = http.app.state.bodies
    arrival = arrival_of(http)
    try:
        job = Job(
            route=route,
            body=await bodies.receive(http),
            max_tokens=service.max_tokens,
            salt="" if arrival.caller is None else arrival.caller.salt,
            with_keys=service.relay.uses_prefixes,
        )
        if (outcome := service.preprocess.run_inline(job)) is not None:
            return outcome
        return await unless_client_leaves(http.scope, service.preprocess.run(job, arrival.tenant, arrival.weight))
    finally:
        bodies.release(http)


def check_key(service: Service, request: Request) -> None:
    """Record a request's API key. If keys are configured, reject a request without a valid one."""
    if service.keys:
        caller = service.keys.find(given_key(request.scope))
        if caller is None:
            raise _unauthorized("a valid API key is required, as `Authorization: Bearer KEY`")
        arrival = arrival_of(request)
        arrival.caller, arrival.tenant, arrival.weight = caller, caller.name, caller.weight


def key_needed(service: Service) -> Any:
    """Return ``check_key`` as a FastAPI dependency."""

    async def known(request: Request) -> None:
        check_key(service, request)

    return Depends(known)


def admin_key_needed(service: Service) -> Any:
    """Return a FastAPI dependency that checks the admin key: 401 if it is wrong, 403 if none is set."""

    async def authorized(request: Request) -> None:
        if not service.keys.has_admin:
            message = "no admin key is set; start the cluster with BATON_ADMIN_KEY"
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="no_admin_key")
        if not service.keys.is_admin(given_key(request.scope)):
            raise _unauthorized("the admin key is required, as `Authorization: Bearer KEY`")

    return Depends(authorized)


def priority_of(arrival: Arrival, asked: int | None) -> int:
    """Return the requested priority, limited to the best one that the API key allows."""
    caller = arrival.caller
    if caller is None:
        return asked or 0
    return caller.priority if asked is None else max(asked, caller.priority)


def session_of(arrival: Arrival, named_in_body: str) -> str:
    """Return ``X-Session-Id``, or else the session or user that the body names."""
    return (arrival.header(_SESSION_HEADER) or "")[:MAX_SESSION_CHARS] or named_in_body


def dp_rank_of(arrival: Arrival, config: DeployConfig, asked: int | None) -> int | None:
    """Return ``X-data-parallel-rank``, or else SGLang's field ``routed_dp_rank``, or else None.

    The rank applies to both roles. In a role without this DP rank, ``dp_policy`` chooses one.
    """
    named = arrival.header(_DP_RANK_HEADER.lower().encode())
    name, given = ("routed_dp_rank", asked) if named is None else (_DP_RANK_HEADER, named)
    if given is None:
        return None
    most = max(config.prefill.parallel.dp, config.decode.parallel.dp)
    text = str(given)
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) >= most:
        raise bad_request(f"{name}: got {shortened(repr(given))}; allowed: 0 to {most - 1}", name)
    return int(text)


def _unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers=headers)


def _body_of(event: Message, request: Request) -> bytes:
    if event["type"] == "http.disconnect":
        refusal: Refusal | None = request.scope.get(REFUSAL_KEY)
        if refusal is None:
            raise ClientDisconnect
        raise ApiError(refusal.status, str(refusal), code=refusal.code)  # for the log and the metrics
    body: bytes = event.get("body", b"")
    return body
