"""A client's connection: HTTP/1.1, whether the client has left, and server-sent events to it.

The protocol is uvicorn's with three changes. The head of an answer is sent together with the beginning of its body:
uvicorn writes one after the other, and each write is a system call, a packet, and a client woken up. A connection
without a complete request head is closed after a while: uvicorn waits for ever. An offer of another protocol, such as
HTTP/2 by Java's client, is ignored: httptools would take the body for that protocol, and lose it.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from types import TracebackType
from typing import Any, TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.answer import Answer
from router.errors import ClientLeftError, RequestFailedError

Got = TypeVar("Got")
Frames = AsyncGenerator[bytes, None]

_WAITING = b": waiting\n\n"
COMMENT_S = 10.0
"""Silence after which a waiting stream gets a comment: proxies close idle connections after 30 to 60 seconds."""
SLOW_READER_S = 60.0
"""Time in which a client must take something of its stream."""
_UNWATCHED_S = 0.05
"""A faster answer needs no task that watches its client; a client that leaves earlier is noticed only then."""
_OFFER = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection; closed when no complete request head comes within ``timeout_keep_alive``."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, JoiningTransport(cast(asyncio.Transport, transport))))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Strip the offer from a request head; bodies, which may be long, are not searched."""
        if self._head_due is not None and data.find(b"pgrade:", 0, data.find(b"\r\n\r\n")) >= 0:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _OFFER.sub(b"", head + end) + rest
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

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
    """A transport that holds the head of an answer until the next write, or the next iteration of the event loop."""

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


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Got]) -> Got:
    """Await the work of a request whose body has been read; raise ClientLeftError if the connection closes first."""
    with _Leash() as leash:
        watching: asyncio.Task[None] | None = None

        def watch() -> None:
            nonlocal watching
            watching = asyncio.create_task(_wait_gone(receive))
            watching.add_done_callback(lambda _: leash.pull("client left"))

        due = asyncio.get_running_loop().call_later(_UNWATCHED_S, watch)
        try:
            return await work
        finally:
            due.cancel()
            if watching is not None:
                watching.cancel()


class _Leash:
    """Lets others cancel the ``with`` block of this task, which then raises ClientLeftError."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._why: str | None = None
        self._is_over = False

    def pull(self, why: str) -> None:
        """Cancel the block, unless it has ended."""
        if not self._is_over and self._why is None:
            assert self._task is not None
            self._why = why
            self._task.cancel()

    def __enter__(self) -> "_Leash":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._why is not None:
            assert self._task is not None
            self._task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise ClientLeftError(self._why) from None


class JsonAnswer(Response):
    """A JSON object; its headers, named in lower case, are written faster than Starlette's."""

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """See Starlette; called by the constructor."""
        given = [] if headers is None else headers.items()
        self.raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in given]
        self.raw_headers += [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json")]


class EventStream(Response):
    """Server-sent events. The status is sent with the first event or comment, so that it shows earlier failures."""

    media_type = "text/event-stream"

    def __init__(
        self,
        open_answer: Callable[[], AbstractAsyncContextManager[Answer]],
        frames: Callable[[Answer], Frames],
        failed: Callable[[RequestFailedError], bytes],
    ) -> None:
        """``failed`` makes the last frame of an answer that fails after its first one."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._open_answer = open_answer
        self._frames = frames
        self._failed = failed
        self._started = False
        self._sends_since_s: float | None = None
        """Start of writing the current frame."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the answer is complete, it fails, or the client leaves or reads nothing for long."""
        del scope
        with suppress(ClientLeftError), _Leash() as leash:
            watch = self._watch(leash)
            try:
                await unless_client_leaves(receive, self._write(send))
            finally:
                watch.cancel()

    def _watch(self, leash: _Leash) -> "asyncio.Task[None]":
        """Give up a client that reads nothing; a time limit for every frame would cost more."""

        async def look() -> None:
            loop, patience_s = asyncio.get_running_loop(), SLOW_READER_S
            due_s = loop.time() + patience_s
            while (wait_s := due_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
                due_s = (self._sends_since_s or loop.time()) + patience_s
            leash.pull("the client reads nothing of its stream")

        return asyncio.create_task(look())

    async def _write(self, send: Send) -> None:
        async with self._open_answer() as answer, aclosing(self._frames(answer)) as frames:
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
        """Write the first frame, and until it comes a comment from time to time."""
        first = asyncio.ensure_future(anext(frames))
        try:
            is_there = False
            while not is_there:
                is_there = bool((await asyncio.wait([first], timeout=COMMENT_S))[0])
                frame = first.result() if is_there else _WAITING
                if not self._started:
                    self.headers.update(answer.headers)
                await self._send(send, frame)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _send(self, send: Send, frame: bytes) -> None:
        """Write one frame; waits while the client does not read."""
        self._sends_since_s = asyncio.get_running_loop().time()
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._sends_since_s = None


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
