"""HTTP clients that cost little: requests are written beforehand, and of replies only end and tokens are looked at."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_TOKEN, _LAST = b"data: {", b"0\r\n\r\n"
_TAIL = len(_TOKEN) - 1
"""Bytes that may be the beginning of either."""


class LoadError(Exception):
    """A reply that is no answer; says what it is."""


def request_of(url: str, path: str, body: Mapping[str, Any]) -> bytes:
    """A whole request, ready to be sent any number of times."""
    content = msgspec.json.encode(body)
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {urlsplit(url).netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Connection(asyncio.Protocol):
    """One connection that is kept, for one request after another."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Events with tokens, of all streams so far."""
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._missing: int | None = None
        """Bytes of a whole answer that have not come; None for a stream."""
        self._tail = b""
        self._has_head = False
        self._reply: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, url: str) -> "Connection":
        """Connect to an endpoint."""
        at = urlsplit(url)
        assert at.hostname is not None and at.port is not None, f"not a whole url: {url}"  # noqa: PT018
        _, connection = await asyncio.get_running_loop().create_connection(cls, at.hostname, at.port)
        return connection

    async def ask(self, request: bytes) -> None:
        """Send a request and wait for the end of its answer.

        Raises:
            LoadError: its status is not 200, or the connection was closed.
        """
        assert self._transport is not None
        self._reply = reply = asyncio.get_running_loop().create_future()
        self._head, self._has_head, self._tail = b"", False, b""
        self._transport.write(request)
        await reply

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._end(LoadError(f"the connection was closed: {exc or 'no reason'}"))

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if not self._has_head:
            self._head += data
            head, is_whole, data = self._head.partition(b"\r\n\r\n")
            if not is_whole:
                return
            self._has_head = True
            if not head.startswith(b"HTTP/1.1 200"):
                self._end(LoadError(f"{head.splitlines()[0].decode()}: {data[:200].decode(errors='replace')}"))
                return
            length = _LENGTH.search(head)
            self._missing = int(length[1]) if length else None
        if self._missing is not None:
            self._missing -= len(data)
            if not self._missing:
                self._end(None)
            return
        seen = self._tail + data
        self.num_tokens += seen.count(_TOKEN)
        self._tail = seen[-_TAIL:]
        if seen.endswith(_LAST):
            self._end(None)

    def _end(self, error: LoadError | None) -> None:
        reply, self._reply = self._reply, None
        if reply is None or reply.done():
            return
        if error is None:
            reply.set_result(None)
        else:
            reply.set_exception(error)
