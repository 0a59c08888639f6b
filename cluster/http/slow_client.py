"""Watch over HTTP clients that read their responses too slowly."""

import asyncio
import fcntl
import termios
from array import array
from contextlib import suppress

LEAST_READ_BYTES = 16 << 10
"""Number of bytes that a client must read in a certain time, unless it has read all."""


def num_unread(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the other machine has not acknowledged, including those in the kernel.

    The kernel takes megabytes, and lets the transport write again only when a good part of them is acknowledged.
    """
    queued = array("i", [0])
    with suppress(OSError):  # a system that cannot tell, or a closed socket
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + queued[0]


class SlowClientWatch:
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
