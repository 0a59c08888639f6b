"""Reading of HTTP connections in turns, so that no crowd of clients takes unlimited time or memory at once."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from cluster.http.connection import BoundedHttpProtocol
from cluster.http.crowd import Crowd


def read_in_turn(protocol: type[BoundedHttpProtocol]) -> Any:
    """Return a factory for uvicorn's ``http`` option, whose connections are read in turns."""

    def make(**arguments: Any) -> Reader:
        return Reader(protocol(**arguments))

    return make


class Reader(asyncio.BufferedProtocol):
    """Receiver of one connection, which takes nothing from the kernel while it waits for its turn to be read."""

    _wire: asyncio.Transport
    _crowd: Crowd
    _arrived = b""
    """Bytes that wait to be read."""
    _is_put_off = False
    """True if the connection is paused until its turn."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self.pause_writing: Callable[[], None] = protocol.pause_writing
        self.resume_writing: Callable[[], None] = protocol.resume_writing
        self.eof_received: Callable[[], None] = protocol.eof_received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._crowd = Crowd.of(asyncio.get_running_loop())
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived = b""
        self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go. All connections use one buffer, because each copies its bytes at once."""
        del sizehint
        return self._crowd.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._arrived += self._crowd.taken(nbytes)
        if not self._is_put_off:
            self._crowd.read(self._read, self._protocol.address)
        if self._arrived:
            self._is_put_off = True
            self._wire.pause_reading()

    def _read(self) -> None:
        data, self._arrived = self._arrived, b""
        if self._wire.is_closing():
            return
        self._protocol.data_received(data)
        if self._is_put_off:
            self._is_put_off = False
            if not self._wire.is_closing() and not self._protocol.flow.read_paused:
                self._wire.resume_reading()
