"""uvicorn's HTTP/1.1, but for three things.

The head of an answer leaves together with the beginning of its body: uvicorn writes them one after another, and each
write is a call into the kernel, a packet, and a client woken up. And who connects and asks for nothing, or never ends
the head of a request, is hung up on: uvicorn waits for ever. And who offers another protocol, as Java's own client
offers HTTP/2, is answered in HTTP/1.1: httptools would take the body for that protocol, and lose it.
"""

import asyncio
import re
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_OFFER = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection, which is kept for ``timeout_keep_alive`` while no whole head of a request comes."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        super().connection_made(cast(asyncio.Transport, JoiningTransport(cast(asyncio.Transport, transport))))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop. Bodies, which may be long, are not looked at."""
        if self._head_due is not None and data.find(b"pgrade:", 0, data.find(b"\r\n\r\n")) >= 0:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _OFFER.sub(b"", head + end) + rest
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Called by uvicorn."""
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
    """A transport that keeps the head of an answer for what is written next, but not beyond this turn of the loop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """As of any transport."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """As of any transport."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
