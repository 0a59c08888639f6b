"""HTTP connection of a client, with limits on the size and the time of what it sends.

The protocol is uvicorn's with these changes. A request head has a maximum size and a deadline, and a body has a
deadline. A refused client gets its answer, and the rest of its request is neither parsed nor kept. A client that does
not read its response is disconnected. An offer to upgrade the protocol, such as the one to HTTP/2 from Java's client,
is ignored, because httptools would treat the body as part of that protocol and lose it.
"""

import asyncio
from collections.abc import Callable, Hashable
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.http.crowd import Crowd
from cluster.http.cycle import Cycle
from cluster.http.flow import WatchfulFlow
from cluster.http.head import size_of, without_offer
from cluster.http.refusal import (
    MAX_HEAD_BYTES,
    REFUSAL_KEY,
    Refusal,
    invalid,
    refusal_of,
    too_large,
    too_slow,
    wrong_version,
)
from cluster.http.slow_client import SlowClientWatch
from cluster.spec.clock import SystemClock

MAX_HEADERS = 128
"""Maximum number of headers of a request."""
MAX_PIPELINED = 8
"""Maximum number of requests that wait on one connection for the responses before theirs."""
MAX_DISCARDED_BYTES = 64 << 20
"""Maximum number of bytes that a client can send after the response. Then its connection is aborted."""
LINGER_S = 2.0
"""Time in which a client that is still sending can read the response, before its connection is aborted.

Closing a socket with unread data resets the connection, and the client may lose the response.
"""
ARRIVED_KEY = "baton.arrived_s"
"""Key of the time in an ASGI scope at which the request's head had arrived, by the system's monotonic clock."""

_SHOWN_BYTES = 60
"""Maximum number of a client's bytes in a message."""
_REQUEST_BYTES = 4 << 10
"""Memory of a request besides its headers."""
_UNREAD_BYTES = 4 << 10
"""Number of bytes of a response that wait for the kernel to take them, above which the client is watched."""
_HEADER_BYTES = 128
"""Memory of a header besides its characters."""
_CLOCK = SystemClock()


class _Stage(Enum):
    HEAD = auto()
    """The next byte belongs to a request head, or to blank lines before it."""
    BODY = auto()
    """The next byte belongs to a body or its trailers."""
    END = auto()
    """No request has begun since the last one ended."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP connection whose client cannot take unlimited time or memory."""

    head_s = 15.0
    """Maximum time from the first byte of a request head to its end."""
    body_s = 60.0
    """Maximum time from the end of a request head to the end of the body."""
    read_s = 60.0
    """Time in which a client has to read 16 KiB if a response waits for it."""

    _stage = _Stage.END
    _running: Cycle | None = None
    """Request being answered; others may have arrived after it."""
    _awaited: _Stage | None = None
    """Stage that the timer limits."""
    _timer: asyncio.TimerHandle | None = None
    _reader: SlowClientWatch | None = None
    """Watch over the client while a response waits for it."""
    _num_head_bytes = 0
    """Bytes since the last packet with the end of a head, a part of a body, or the end of a request."""
    _num_discarded = 0
    _is_deaf = False
    """True if data from the client is discarded."""
    _has_said_all = False
    """True if no response follows."""

    def refused(self, refusal: Refusal) -> ASGIApp:
        """Return the application that answers a refused request."""
        raise NotImplementedError

    def client_of(self, scope: Any) -> Hashable:
        """Return the identity of the client that sent a request. Clients take turns."""
        return (scope.get("client") or ("",))[0]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._crowd = Crowd.of(self.loop)
        super().connection_made(self._wire)
        self.flow = WatchfulFlow(self._wire)
        self._wire.set_write_buffer_limits(_UNREAD_BYTES)
        self._limit(_Stage.END, self.timeout_keep_alive, self._expire)
        self._crowd.add_idle(self._wire)

    def connection_lost(self, exc: Exception | None) -> None:
        running = self._running
        client = self.client_of(running.scope if running is not None else {"client": self.client})
        cast(WatchfulFlow, self.flow).stop_watching()
        self.headers = []
        self.pipeline.clear()
        if running is not None and not running.response_complete:
            running.abandon()
        self._crowd.take_turn(partial(self._end, exc), lambda: client)

    def _end(self, exc: Exception | None) -> None:
        """Tell a running request that its client has left, and forget the connection."""
        self._stop_timer()
        self._forget_reader()
        self._crowd.forget_idle(self._wire)
        self._crowd.forget_arrived(self._wire)
        self._unset_keepalive_if_required()
        running = self._running
        super().connection_lost(exc)
        if running is not None and not running.response_complete:
            running.leave()
        # Without cycles of references, no memory waits for the garbage collector.
        self.transport = self.flow = self.cycle = self._running = cast(Any, None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader = SlowClientWatch(self._wire, self.read_s)
        client = self.client_of(self._running.scope if self._running is not None else {})
        self._crowd.unread.hold(self._wire, client, self._wire.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_reader()

    def _forget_reader(self) -> None:
        self._crowd.unread.forget(self._wire)
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    @property
    def address(self) -> Hashable:
        """Address of the client, whose connections take turns with those of other addresses."""
        return self.client[0] if self.client else ""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_deaf:
            self._discard(data)
            return
        if self._stage is _Stage.END:
            self._stage = _Stage.HEAD
        self._num_head_bytes += len(data)
        self._parse(data)
        if self._stage is _Stage.END and self.scope is not self.cycle.scope:
            self._stage = _Stage.HEAD  # of the next request
        if self._stage is not _Stage.END and not self._is_deaf:
            self._limit_rest(data)
        self._count_arrived()
        self._count_idle()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if self.headers[-1][0] == b"transfer-encoding" and value.lower() != b"chunked":
            message = f"the transfer encoding {value[:_SHOWN_BYTES]!r} is not supported, use chunked"
            raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "unsupported_encoding", message)
        if len(self.headers) > MAX_HEADERS:
            message = f"the request has more than {MAX_HEADERS} headers"
            raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too_many_headers", message)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise wrong_version(version)
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise invalid("CONNECT is not supported")
            return  # without the offer, the request is parsed once more
        num_bytes = len(self.url) + size_of(self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            raise too_large("the request head is")
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on one connection"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, "too_many_requests", message)
        self._begin(version, _REQUEST_BYTES + _HEADER_BYTES * len(self.headers) + num_bytes)
        self.headers = []  # of trailers, which are ignored
        self._stage = _Stage.BODY
        self._num_head_bytes = 0

    def _begin(self, version: str, num_head_bytes: int) -> None:
        """Begin the request whose head has arrived, or let it wait for those before it."""
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope = cast(Scope, self.scope)
        scope["http_version"] = version
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        scope[ARRIVED_KEY] = _CLOCK.now_s()
        last = self.cycle
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        self.cycle = self._cycle(scope, keep_alive=keep_alive, num_head_bytes=num_head_bytes)
        if last is None or last.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))
            if len(self.pipeline) == MAX_PIPELINED:
                self.flow.pause_reading()

    def _cycle(self, scope: Scope, *, keep_alive: bool, num_head_bytes: int) -> Any:
        """Return a request, in place of uvicorn's class."""
        return Cycle(
            scope,
            self._wire,
            self.flow,
            keep_alive=keep_alive,
            expects_continue=self.expect_100_continue and scope["http_version"] != "1.0",
            close=self._close,
            on_response=self.on_response_complete,
            on_taken=self._count_arrived,
            num_head_bytes=num_head_bytes,
        )

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._stage is not _Stage.BODY:  # an offer
            return
        if self.headers and size_of(self.headers) > MAX_HEAD_BYTES:
            raise too_large("the trailers are")
        self._stage = _Stage.END
        self._num_head_bytes = 0
        if self._timer is not None:
            self._stop_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        self._crowd.take_turn(partial(self._start, cycle, app), partial(self.client_of, cycle.scope))

    def _start(self, cycle: Cycle, app: ASGIApp) -> None:
        if not cycle.disconnected:
            super()._start_asgi_task(cast(Any, cycle), cast(Any, app))

    def on_response_complete(self) -> None:
        if not self._has_said_all:
            super().on_response_complete()
            if self._stage is _Stage.HEAD:  # it has a limit of its own
                self._unset_keepalive_if_required()
            self._count_idle()
        self._count_arrived()

    def _count_arrived(self) -> None:
        """Count what has arrived and no application has taken."""
        if self._wire.is_closing():
            self._crowd.forget_arrived(self._wire)
            return
        head = self._num_head_bytes if self._stage is _Stage.HEAD and not self._is_deaf else 0
        self._crowd.heads.hold(self._wire, self.address, head)
        if self._running is not None:
            waiting = sum(cast(Cycle, cycle).num_arrived_bytes for cycle, _ in self.pipeline)
            num_bytes = self._running.num_arrived_bytes + waiting
            client = self.client_of(self._running.scope) if num_bytes else None
            self._crowd.arrived.hold(self._wire, client, num_bytes)

    def _count_idle(self) -> None:
        """Count the connection among the idle ones while it waits for its client."""
        if self._wire.is_closing():
            return
        if self._stage is not _Stage.END or self._running is None or self._running.response_complete:
            self._crowd.add_idle(self._wire)
        else:
            self._crowd.forget_idle(self._wire)

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = without_offer(self.parser, self.url, self.headers) + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn's constructor
            except httptools.HttpParserError as error:
                self._refuse(refusal_of(error, data))
                return

    def _limit_rest(self, data: bytes) -> None:
        """Limit what may follow the incomplete request that ``data`` has begun or continued."""
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(too_large("the request head is" if self._stage is _Stage.HEAD else "a chunk's head is"))
            return
        if self._awaited is not self._stage:
            self._limit(self._stage, self.head_s if self._stage is _Stage.HEAD else self.body_s, self._expire)
        if self._stage is _Stage.BODY and self.cycle.response_complete:
            self._discard(data)

    def _limit(self, stage: _Stage | None, seconds: float, expire: Callable[[], None]) -> None:
        self._stop_timer()
        self._num_discarded = 0
        self._awaited = stage
        self._timer = self.loop.call_later(seconds, expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._awaited = None

    def _expire(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (is_answering and self._stage is not _Stage.BODY):
            self._awaited = None  # the rest waits for us
            self._limit_rest(b"")
        elif self._stage is _Stage.BODY:
            self._refuse(too_slow("body", self.body_s))
        elif self._stage is _Stage.HEAD:
            self._refuse(too_slow("head", self.head_s))
        else:
            self._hang_up()

    def _discard(self, data: bytes) -> None:
        self._num_discarded += len(data)
        if self._num_discarded > MAX_DISCARDED_BYTES:
            self._wire.abort()

    def _refuse(self, refusal: Refusal) -> None:
        """Refuse the request that is arriving, after the responses before its own, and close the connection."""
        self._is_deaf = True
        self._stop_timer()
        before = cast(Cycle | None, self.cycle)
        has_to_wait = before is not None and not before.response_complete
        if self._stage is _Stage.BODY:
            assert before is not None
            if has_to_wait := bool(self.pipeline):
                self.pipeline.popleft()
            else:
                cast(dict[str, Any], before.scope)[REFUSAL_KEY] = refusal
                before.leave()
                if before.response_started:
                    self._close()
                    return
        self._stage = _Stage.HEAD
        self.expect_100_continue = False
        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "http_version": "1.1",
            "client": self.client,
            "headers": [],
        }
        self.cycle = self._cycle(scope, keep_alive=False, num_head_bytes=0)
        if has_to_wait:
            self.pipeline.appendleft((self.cycle, cast(Any, self.refused(refusal))))
        else:
            self._start_asgi_task(self.cycle, self.refused(refusal))

    def _close(self) -> None:
        """Close the connection. If the client is still sending, let it read the response first."""
        self._has_said_all = True
        if self._wire.is_closing():
            return
        if self._stage is _Stage.END:
            self._hang_up()
            return
        self._is_deaf = True
        self.flow.resume_reading()
        self._wire.write_eof()
        self._limit(None, LINGER_S, self._wire.abort)

    def _hang_up(self) -> None:
        """Close the connection once the client has read the rest, or when it reads too slowly."""
        self._wire.close()
        if self._reader is None:
            self._reader = SlowClientWatch(self._wire, self.read_s)
