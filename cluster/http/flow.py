"""Flow control of one HTTP connection."""

import asyncio
import select

from uvicorn.protocols.http.flow_control import FlowControl

LOOK_S = 1.0
"""Time after which a client that has left is noticed while reading is paused."""


class WatchfulFlow(FlowControl):
    """Flow control that disconnects a client that leaves while reading is paused.

    The event loop learns of a departure only when it has read all that came before.
    """

    _timer: asyncio.TimerHandle | None = None

    def pause_reading(self) -> None:
        if not self.read_paused:
            super().pause_reading()
            self._look_later()

    def resume_reading(self) -> None:
        self.stop_watching()
        super().resume_reading()

    def stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        if _has_left(self._transport):
            self._transport.abort()
        else:
            self._look_later()


def _has_left(transport: asyncio.Transport) -> bool:
    """Return whether the client has closed the connection, even if not all of its bytes have been read."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
