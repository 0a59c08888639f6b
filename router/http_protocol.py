"""uvicorn's HTTP/1.1 with three changes.

The head of an answer is sent together with the beginning of its body: uvicorn writes one after the other, and each
write is a system call, a packet, and a client woken up. A connection without a complete request head is closed after a
while: uvicorn waits for ever. An offer of another protocol, such as HTTP/2 by Java's client, is ignored: httptools
would take the body for that protocol, and lose it.
"""

import asyncio
import re
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
