"""Limits on all HTTP connections of an event loop together, so that no number of them harms the others."""

import asyncio
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import ClassVar
from weakref import WeakKeyDictionary

from cluster.http.holdings import Holdings

MAX_TURNS = 4
"""Maximum number of requests that start, and of connections that end, in one pass of the event loop."""
MAX_READ_S = 0.005
"""Time in one pass of the event loop after which nothing more is read from connections."""
MAX_WAITING_READS = 256
"""Number of connections that wait to be read, above which little is taken from others."""
MAX_UNREAD_BYTES = 128 << 20
"""Maximum size of the responses that clients have not read."""
NUM_ACCEPTED = 16
"""Maximum number of connections that are accepted in one pass of the event loop."""
MAX_UNFINISHED_BYTES = 32 << 20
"""Maximum size of all incomplete request heads together."""
MAX_ARRIVED_BYTES = 64 << 20
"""Maximum number of bytes received for requests that no application has begun to answer."""
_BUFFER_BYTES, _PIECE_BYTES = 64 << 10, 1 << 10
"""Maximum number of bytes that are taken from a connection at once, and while many wait to be read."""
_IDLE_SHARE = 0.5
"""Maximum share of the process's file descriptors that connections take while they wait for their clients."""


def handles_of(listener: socket.socket) -> list[socket.socket]:
    """Return several handles of a listening socket, because libuv accepts one connection per handle and pass.

    With one handle, new clients would wait for seconds while many others are read in each pass.
    """
    return [listener.dup() for _ in range(NUM_ACCEPTED)]


class _Turns:
    """Calls that wait, by client. Clients take turns, so that none waits for another one's crowd."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[Callable[[], object]]] = {}
        """The first client is the next."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, call: Callable[[], object], client: Hashable) -> None:
        self._num_waiting += 1
        self._waiting.setdefault(client, deque()).append(call)

    def pop(self) -> Callable[[], object]:
        self._num_waiting -= 1
        client = next(iter(self._waiting))
        own = self._waiting.pop(client)
        call = own.popleft()
        if own:
            self._waiting[client] = own
        return call


class Crowd:
    """All HTTP connections of one event loop.

    In each pass of the loop, only so much is read, and so few requests start and connections end, that streams and
    timers never wait for a crowd of clients.
    """

    _crowds: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "Crowd"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._reads, self._turns = _Turns(), _Turns()
        self._whole = memoryview(bytearray(_BUFFER_BYTES))
        self._piece = self._whole[:_PIECE_BYTES]
        self._is_counting = False
        """True if something was read or had its turn in this pass."""
        self._num_left = MAX_TURNS
        """Number of requests that may still have a turn in this pass."""
        self._left_s = MAX_READ_S
        """Time that reading may still take in this pass."""
        self.heads = Holdings(MAX_UNFINISHED_BYTES)
        """Parts of request heads by address, because their clients are not known yet."""
        self.arrived = Holdings(MAX_ARRIVED_BYTES)
        """Requests that no application has taken yet, from their complete heads on."""
        self.unread = Holdings(MAX_UNREAD_BYTES)
        """Responses of the connections whose clients have to read before more is sent."""
        self._idle: dict[asyncio.Transport, None] = {}
        """Connections that wait for their clients, the one that waits longest first."""
        self.max_idle = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * _IDLE_SHARE)
        """Maximum number of idle connections, so that there are descriptors for others."""

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Crowd":
        return cls._crowds.get(loop) or cls._crowds.setdefault(loop, cls())

    @property
    def buffer(self) -> memoryview:
        """Memory for the next bytes of a connection; little while many wait to be read, to limit what they hold."""
        return self._whole if len(self._reads) < MAX_WAITING_READS else self._piece

    def taken(self, num_bytes: int) -> bytes:
        """Return a copy of the first bytes in the buffer."""
        return bytes(self._whole[:num_bytes])

    def read(self, parse: Callable[[], object], client: Hashable) -> None:
        """Read what has arrived on a connection, in a later pass of the event loop if ``MAX_READ_S`` are over."""
        if not self._is_counting:
            self._count_pass()
        if self._reads or self._left_s <= 0:
            self._reads.add(parse, client)
        else:
            self._read_now(parse)

    def take_turn(self, call: Callable[[], object], client: Callable[[], Hashable]) -> None:
        """Start a request or end a connection, in a later pass if ``MAX_TURNS`` have been taken in this one."""
        if not self._is_counting:
            self._count_pass()
        if self._num_left and not self._turns:
            self._num_left -= 1
            call()
        else:
            self._turns.add(call, client())

    def add_idle(self, wire: asyncio.Transport) -> None:
        """Mark a connection as waiting for its client, who has just done something.

        If many do, disconnect the one that waits longest.
        """
        self._idle.pop(wire, None)
        self._idle[wire] = None
        if len(self._idle) > self.max_idle:
            oldest = next(iter(self._idle))
            self.forget_idle(oldest)
            oldest.abort()

    def forget_arrived(self, wire: asyncio.Transport) -> None:
        """Mark a connection as having no unread data."""
        self.heads.forget(wire)
        self.arrived.forget(wire)

    def forget_idle(self, wire: asyncio.Transport) -> None:
        self._idle.pop(wire, None)

    def _count_pass(self) -> None:
        self._is_counting = True
        asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._num_left, self._left_s = MAX_TURNS, MAX_READ_S
        self._is_counting = False
        if self._reads or self._turns:
            self._count_pass()
            while self._turns and self._num_left:
                self._num_left -= 1
                self._turns.pop()()
            while self._reads and self._left_s > 0:
                self._read_now(self._reads.pop())

    def _read_now(self, parse: Callable[[], object]) -> None:
        begin_s = time.perf_counter()
        parse()
        self._left_s -= time.perf_counter() - begin_s
