"""One HTTP request and its response, between a connection and the ASGI application that answers."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl

LEFT_KEY = "baton.left"
"""Key of a request's ``Departure`` in an ASGI scope."""
_STATUS_LINES = {status.value: f"HTTP/1.1 {status} {status.phrase}\r\n".encode() for status in HTTPStatus}
_ERROR = 400
_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)

_log = logging.getLogger(__name__)


class Departure:
    """Tells an application, at once, that its client has left."""

    __slots__ = ("_call", "has_happened")

    def __init__(self) -> None:
        self.has_happened = False
        self._call: Callable[[], object] | None = None

    def expect(self, call: Callable[[], object]) -> None:
        """Make a call when the client leaves, or now if it has left."""
        if self.has_happened:
            call()
        else:
            self._call = call

    def forget(self) -> None:
        self._call = None

    def happen(self) -> None:
        self.has_happened = True
        if self._call is not None:
            self._call()


class Cycle:
    """One request and its response, which takes the place of uvicorn's class with the same interface.

    A response's head is sent together with the beginning of its body, because separate writes cost a system call, a
    packet, and a wakeup of the client. Responses to HTTP/1.0 are not chunked: they end with the connection.
    """

    def __init__(
        self,
        scope: Scope,
        wire: asyncio.Transport,
        flow: FlowControl,
        *,
        keep_alive: bool,
        expects_continue: bool,
        close: Callable[[], None],
        on_response: Callable[[], None],
        on_taken: Callable[[], None],
        num_head_bytes: int,
    ) -> None:
        """Begin with a request's head.

        Args:
            close: closes the connection after the response.
            on_taken: called when the application has taken what had arrived of the body.
        """
        self.scope = scope
        self.keep_alive = keep_alive
        self.message_event = asyncio.Event()
        self.disconnected = False
        self.body = bytearray()
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self._wire = wire
        self._flow = flow
        self._expects_continue = expects_continue
        self._close = close
        self._on_response = on_response
        self._on_taken = on_taken
        self._num_head_bytes = num_head_bytes
        self._is_taken = False
        self._head = b""
        self._is_chunked = False
        scope[LEFT_KEY] = self._departure = Departure()

    @property
    def num_arrived_bytes(self) -> int:
        """Size of what has arrived of the request; 0 once the application has taken all of it."""
        return 0 if self._is_taken or self.response_complete else self._num_head_bytes + len(self.body)

    def abandon(self) -> None:
        """Free the memory of a request whose client has left; the application hears of it from ``leave``."""
        self.disconnected = True
        self.body.clear()
        self.scope["headers"].clear()

    def leave(self) -> None:
        """Tell the application that the client has left."""
        self.disconnected = True
        self.message_event.set()
        self._departure.happen()

    async def run_asgi(self, app: ASGIApp) -> None:
        """Answer the request, and close the connection if ``app`` fails. HEAD is answered like GET, without a body."""
        scope = {**self.scope, "method": "GET"} if self.scope["method"] == "HEAD" else self.scope
        try:
            await app(scope, self.receive, self.send)
            assert self.response_complete or self.disconnected, "the application did not complete its response"
        except BaseException as error:
            _log.error("a request failed", exc_info=error)
            if self.response_started:
                self._close()
            else:
                self.keep_alive = False
                status, headers = HTTPStatus.INTERNAL_SERVER_ERROR, [(b"content-length", b"0")]
                await self.send({"type": "http.response.start", "status": status, "headers": headers})
                await self.send({"type": "http.response.body"})
        finally:
            # Without a reference to the connection, nothing waits for the garbage collector.
            self._close = self._on_response = self._on_taken = lambda: None

    async def receive(self) -> Message:
        """Return what has arrived of the body, or wait for more, or for the client's departure."""
        if self._expects_continue and not self._wire.is_closing():
            self._expects_continue = False
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.disconnected and not self.response_complete:
            self._flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        self._is_taken = not self.more_body
        self._on_taken()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send the head of the response, which waits for the body, or a part of the body."""
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
        else:
            self._write(message.get("body", b""), message.get("more_body", False))

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        assert not self.response_started
        self.response_started = True
        self._expects_continue = False
        head, has_length = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status], False
        for name, value in headers:
            assert b"\n" not in value, (name, value)
            has_length = has_length or name == b"content-length"
            head += (name, b": ", value, b"\r\n")
        if status >= _ERROR and self.more_body:
            self.keep_alive = False
        if not self.keep_alive:
            head.append(b"connection: close\r\n")
        has_body = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        self._is_chunked = has_body and not has_length and self.scope["http_version"] != "1.0"
        head.append(b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")
        self._head = b"".join(head)

    def _write(self, body: bytes, has_more: bool) -> None:
        assert self.response_started
        assert not self.response_complete
        if self._is_chunked:
            end = b"" if has_more else b"0\r\n\r\n"
            body = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        elif self.scope["method"] == "HEAD":
            body = b""
        if self._head:
            body, self._head = self._head + body, b""
        if body and not self._wire.is_closing():
            self._wire.write(body)
        if not has_more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self._close()
            self._on_response()
