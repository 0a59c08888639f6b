"""Transports of HTTP responses: changes of what uvicorn writes, and what is still unread."""

import asyncio
import fcntl
import termios
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LEAST_READ_BYTES = 16 << 10
"""Number of bytes that a client has to read in a certain time, if more are there."""

_STATUS_OFFSET = len("HTTP/1.1 ")
_ERROR = ord("4")


class _TransportWrapper:
    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class JoiningTransport(_TransportWrapper):
    """Transport that holds back a response's head until the next write or event loop iteration."""

    def __init__(
        self, transport: asyncio.Transport, checked: Callable[[bytes], bytes], close: Callable[[], None]
    ) -> None:
        """Wrap ``transport``; ``checked`` returns the head to write for an error's, ``close`` closes ``transport``."""
        super().__init__(transport)
        self._loop = asyncio.get_running_loop()
        self._checked = checked
        self._close = close
        self._head = b""
        self._is_closing = False

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._is_closing:
            return
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data if data[_STATUS_OFFSET] < _ERROR else self._checked(data)
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._close()
        self._is_closing = True

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class UnchunkedTransport(_TransportWrapper):
    """Transport of the response to an HTTP/1.0 request, without the chunked encoding that uvicorn adds."""

    _ENCODING = b"transfer-encoding: chunked\r\n"
    _is_chunked: bool | None = None
    """True if the body is chunked; None before the head."""

    def write(self, data: bytes) -> None:
        if self._is_chunked is None:
            self._is_chunked = self._ENCODING in data
            data = data.replace(self._ENCODING, b"")
        elif self._is_chunked:  # uvicorn writes each chunk in one piece
            size, _, body = data.partition(b"\r\n")
            data = body[: int(size, 16)]
        self._transport.write(data)


def num_unread(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the other machine has not acknowledged, including those in the kernel.

    The kernel takes megabytes, and lets the transport write again only when a good part of them is acknowledged.
    """
    queued = array("i", [0])
    with suppress(OSError):  # a system that cannot tell, or a closed socket
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + queued[0]


class ReaderWatch:
    """Watch over a client for which a response waits; it is disconnected if it reads too slowly."""

    def __init__(self, wire: asyncio.Transport, read_s: float) -> None:
        """Watch until ``stop``; the client has ``read_s`` for every ``LEAST_READ_BYTES``."""
        self._wire = wire
        self._read_s = read_s
        self._look_again()

    def stop(self) -> None:
        self._timer.cancel()

    def _look_again(self) -> None:
        due = num_unread(self._wire) - LEAST_READ_BYTES
        self._timer = asyncio.get_running_loop().call_later(self._read_s, self._look, due)

    def _look(self, due: int) -> None:
        if num_unread(self._wire) > due:
            self._wire.abort()
        else:
            self._look_again()
