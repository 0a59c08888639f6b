"""HTTP connection of a client, with disconnects and server-sent events.

The protocol is uvicorn's with four changes. A response's head is sent together with the beginning of its body, because
separate writes cost a system call, a packet, and a wakeup of the client. A connection without a complete request head
is closed after a timeout; uvicorn would wait forever. An offer to upgrade the protocol, such as the one to HTTP/2 from
Java's client, is ignored, because httptools would treat the body as part of that protocol and lose it. Responses to
HTTP/1.0 are not chunked: they end with the connection.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.answer import Answer
from router.errors import ClientLeftError, RequestFailedError

Got = TypeVar("Got")
Frames = AsyncGenerator[bytes, None]

_WAITING = b"\n"
"""Event without data, which clients skip. Some clients fail on a comment before the first event."""
WAITING_S = 10.0
"""Interval between empty events in a waiting stream; proxies close idle connections after 30 to 60 seconds."""
SLOW_READER_S = 60.0
"""Time after which a client that does not read from its stream is disconnected."""
_UNWATCHED_S = 0.05
"""Delay before the router watches for a disconnect, so that a fast answer needs no second task."""
_OFFER = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """HTTP connection that is closed if no complete request head arrives within ``timeout_keep_alive``."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, JoiningTransport(cast(asyncio.Transport, transport))))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Strip the upgrade offer from a request head."""
        if self._head_due is not None and data.find(b"pgrade:", 0, data.find(b"\r\n\r\n")) >= 0:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _OFFER.sub(b"", head + end) + rest
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.transport = cast(asyncio.Transport, UnchunkedTransport(self.transport))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head()

    def _await_head(self) -> None:
        self._head_due = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


class JoiningTransport:
    """Transport that holds back a response's head until the next write or event loop iteration."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class UnchunkedTransport:
    """Transport of the response to an HTTP/1.0 request, without the chunked encoding that uvicorn adds."""

    _ENCODING = b"transfer-encoding: chunked\r\n"

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_chunked: bool | None = None
        """True if the body is chunked; None before the head."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._is_chunked is None:
            self._is_chunked = self._ENCODING in data
            data = data.replace(self._ENCODING, b"")
        elif self._is_chunked:  # uvicorn writes each chunk in one piece
            size, _, body = data.partition(b"\r\n")
            data = body[: int(size, 16)]
        self._transport.write(data)


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Got]) -> Got:
    """Return the result of ``work``; raise ClientLeftError if the client leaves first. The body must have been read."""
    watching: asyncio.Task[None] | None = None

    def watch() -> None:
        nonlocal watching
        watching = asyncio.create_task(_expire_when_left(receive, limit))

    try:
        async with asyncio.timeout(None) as limit:
            due = asyncio.get_running_loop().call_later(_UNWATCHED_S, watch)
            try:
                return await work
            finally:
                due.cancel()
                if watching is not None:
                    watching.cancel()
    except TimeoutError:
        if limit.expired():
            raise ClientLeftError("client left") from None
        raise


async def _expire_when_left(receive: Receive, limit: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    limit.reschedule(0)


class JsonAnswer(Response):
    """JSON response that encodes its headers faster than Starlette does; their names must be lowercase."""

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Override Starlette's method, which the constructor calls."""
        given = [] if headers is None else headers.items()
        self.raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in given]
        self.raw_headers += [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json")]


class EventStream(Response):
    """Response of server-sent events. The status is held back so that an error before the first event can set it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        opening: AbstractAsyncContextManager[Answer],
        frames: Callable[[Answer], Frames],
        failed: Callable[[RequestFailedError], bytes],
    ) -> None:
        """Stream the frames of an answer; ``failed`` returns the last frame if the stream fails after its first one."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._opening = opening
        self._frames = frames
        self._failed = failed
        self._started = False
        self._sends_since_s: float | None = None
        """Time at which the write of the current frame began; None between frames."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or fails, or the client leaves or stops reading."""
        del scope
        try:
            async with asyncio.timeout(None) as limit:
                self._watch(limit)
                try:
                    await unless_client_leaves(receive, self._write(send))
                finally:
                    self._timer.cancel()
        except ClientLeftError:
            pass
        except TimeoutError:
            if not limit.expired():
                raise

    def _watch(self, limit: asyncio.Timeout) -> None:
        """Expire the limit if the client stops reading. Setting a limit for every frame would cost more."""
        loop = asyncio.get_running_loop()
        due_s = (self._sends_since_s or loop.time()) + SLOW_READER_S
        if due_s <= loop.time():
            limit.reschedule(due_s)
        else:
            self._timer = loop.call_at(due_s, self._watch, limit)

    async def _write(self, send: Send) -> None:
        async with self._opening as answer, aclosing(self._frames(answer)) as frames:
            try:
                await self._send_first(send, answer, frames)
                async for frame in frames:
                    await self._send(send, frame)
            except RequestFailedError as error:
                if not self._started:
                    raise
                await self._send(send, self._failed(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_first(self, send: Send, answer: Answer, frames: Frames) -> None:
        """Write the first frame, and empty events until it is available."""
        first = asyncio.ensure_future(anext(frames))
        try:
            is_there = False
            while not is_there:
                is_there = bool((await asyncio.wait([first], timeout=WAITING_S))[0])
                frame = first.result() if is_there else _WAITING
                if not self._started:
                    self.headers.update(answer.headers)
                await self._send(send, frame)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _send(self, send: Send, frame: bytes) -> None:
        self._sends_since_s = asyncio.get_running_loop().time()
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._sends_since_s = None


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
