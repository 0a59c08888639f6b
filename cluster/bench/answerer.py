"""Answers every request at once: what clients, sockets and the machine take without a router."""

import asyncio
import re
import threading
from concurrent.futures import Future
from typing import cast

import uvloop

_HOST = "127.0.0.1"
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_CONTENT = b'{"id":"none","object":"text_completion","choices":[]}'
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_CONTENT),
    _CONTENT,
)


class Answerer:
    """A process of its own, called over a pipe."""

    def __init__(self) -> None:
        self._running: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), name="answerer")

    def start(self) -> str:
        """Answer until ``close``; the base url."""
        self._thread.start()
        return self._running.result()[0]

    def close(self) -> None:
        """End the thread."""
        _, loop, stopped = self._running.result()
        loop.call_soon_threadsafe(stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await loop.create_server(_Connection, _HOST, 0)
        self._running.set_result((f"http://{_HOST}:{server.sockets[0].getsockname()[1]}", loop, stopped))
        await stopped.wait()
        server.close()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._missing: int | None = None
        """Bytes of the request that have not come; None while its head has not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._missing is None:
            self._head += data
            head, is_whole, data = self._head.partition(b"\r\n\r\n")
            if not is_whole:
                return
            length = _LENGTH.search(head)
            self._missing = int(length[1]) if length else 0
        self._missing -= len(data)
        if not self._missing:
            assert self._transport is not None
            self._head, self._missing = b"", None
            self._transport.write(_ANSWER)
