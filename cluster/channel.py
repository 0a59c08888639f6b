"""Typed messages between processes: MessagePack over ZeroMQ PUSH and PULL. The only file that imports zmq."""

from collections.abc import Iterable
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from cluster.spec.errors import PeerUnreachableError
from cluster.spec.messages import Message

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Larger frames are refused by the receiver's socket; 64 MiB holds a prompt of some ten million tokens."""

_LINGER_MS = 1000

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The frame of one message."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """The message of one frame.

    Raises:
        msgspec.DecodeError: the frame is not one of our messages.
    """
    return _decoder.decode(frame)


class Inbox:
    """Where one process listens. The messages of one sender arrive in order; those of several interleave."""

    def __init__(self, host: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        _limit(self._socket)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self.num_malformed = 0

    def receive(self, timeout_s: float) -> list[Message]:
        """Everything that has arrived; waits up to the timeout for the first message."""
        messages: list[Message] = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return messages
        while True:
            try:
                messages.append(decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages
            except msgspec.DecodeError:
                self.num_malformed += 1

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._socket.close(linger=0)
        self._context.term()


class AsyncInbox:
    """An inbox for an event loop; must be made inside the running loop."""

    def __init__(self, host: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        _limit(self._socket)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self.num_malformed = 0

    async def receive(self) -> Message:
        """The next message; malformed frames are dropped and counted."""
        while True:
            try:
                return decode(await self._socket.recv())
            except msgspec.DecodeError:
                self.num_malformed += 1

    async def __aenter__(self) -> "AsyncInbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger=0)
        self._context.term()


class Outbox:
    """Sends to any inbox without blocking. One thread, or one event loop, uses one outbox."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def send(self, address: str, message: Message) -> None:
        """Queue one message.

        Raises:
            PeerUnreachableError: the queue to this address is full, so nobody has read from it for long.
        """
        self.broadcast([address], message)

    def broadcast(self, addresses: Iterable[str], message: Message) -> None:
        """Queue one message for several peers; it is packed once.

        Raises:
            PeerUnreachableError: as ``send``; those after the first such address get nothing.
        """
        frame = encode(message)
        for address in addresses:
            try:
                self._socket(address).send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise PeerUnreachableError(f"nobody reads at {address}; {type(message).__name__} not sent") from None

    def forget(self, address: str) -> None:
        """Drop the connection to a peer that is gone, with what was still queued for it."""
        socket = self._sockets.pop(address, None)
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        """Give queued messages a moment to leave, then close; safe to call twice."""
        for socket in self._sockets.values():
            socket.close(linger=_LINGER_MS)
        self._sockets.clear()
        self._context.term()

    def _socket(self, address: str) -> "zmq.Socket[bytes]":
        if address not in self._sockets:
            socket = self._context.socket(zmq.PUSH)
            _limit(socket)
            socket.setsockopt(zmq.SNDHWM, 10_000)
            socket.connect(address)
            self._sockets[address] = socket
        return self._sockets[address]


def _limit(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, 0)
