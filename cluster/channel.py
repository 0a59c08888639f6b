"""Typed messages between processes: MessagePack over ZeroMQ PUSH and PULL. The only file that imports zmq.

With a key, connections are encrypted and both ends proven by CURVE (RFC 26); see docs/security.md.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.utils.z85

from cluster.spec import wire
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.messages import Message
from cluster.spec.token_ids import from_wire, to_wire
from cluster.spec.worker_spec import ChannelKey

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Larger ones are not sent, and dropped if they come; 64 MiB holds a prompt of some ten million tokens."""

_HARD_LIMIT_BYTES = 2 * MAX_FRAME_BYTES
"""At such a frame a receiver hangs up before it has taken memory for it."""
_LINGER_MS = 1000
_IDLE_S = 60.0
"""Connections unused for so long are dropped when another one is made: most of their peers are gone."""
_REFUSALS_AT = "inproc://refusals"
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_MOST_AT_ONCE = 512
"""Messages taken by one call of an event loop, whose other tasks then have their turn."""

_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=from_wire)


def encode(message: Message) -> bytes:
    """The frame of one message."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """The message of one frame.

    Raises:
        msgspec.DecodeError: the frame is not one of our messages.
    """
    return wire.decode(_decoder, frame)


def draw_key() -> ChannelKey:
    """A fresh key pair for one cluster."""
    public, secret = zmq.curve_keypair()
    return ChannelKey(public=public, secret=secret)


class _Pull:
    """A listening socket, and what it has dropped."""

    def __init__(self, host: str, key: ChannelKey | None = None) -> None:
        """With a key, only those who have it get a message in."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._doorkeeper = None if key is None else _Doorkeeper(self._context, self._socket, key.public)
        _limit(self._socket)
        if key is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey = key.secret
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._dropped: Counter[str] = Counter()

    @property
    def dropped(self) -> Counter[str]:
        """Frames that were ``malformed`` or too ``large``, and connections of a ``stranger``, since the start."""
        strangers = 0 if self._doorkeeper is None else self._doorkeeper.num_refused
        return self._dropped + Counter(stranger=strangers)

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._socket.close(linger=0)
        self._context.term()

    def _take(self, most: int) -> list[Message]:
        """What has arrived, without waiting."""
        messages: list[Message] = []
        while len(messages) < most:
            try:
                message = self._accept(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if message is not None:
                messages.append(message)
        return messages

    def _accept(self, frame: bytes) -> Message | None:
        """The message of a frame; None, and counted, if it is none of ours."""
        if len(frame) > MAX_FRAME_BYTES:
            self._dropped["large"] += 1
            return None
        try:
            return decode(frame)
        except msgspec.DecodeError:
            self._dropped["malformed"] += 1
            return None


class Inbox(_Pull):
    """Where one process listens. The messages of one sender arrive in order; those of several interleave."""

    def receive(self, timeout_s: float) -> list[Message]:
        """Everything that has arrived; waits up to the timeout for the first message."""
        if timeout_s > 0:
            self._socket.poll(int(timeout_s * 1000))
        return self._take(sys.maxsize)


class AsyncInbox(_Pull):
    """An inbox for an event loop; must be made inside the running loop."""

    def __init__(self, host: str, key: ChannelKey | None = None) -> None:
        super().__init__(host, key)
        self._come = asyncio.Event()
        self._is_empty = False
        self._loop = asyncio.get_running_loop()
        # Readable when something may have changed, until the socket is looked at.
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._come.set)

    async def receive(self) -> list[Message]:
        """What has arrived, at most some hundreds; waits for the first. Others have their turn before each call."""
        while True:
            # The descriptor tells of what comes after the socket was found empty, and of nothing else.
            await (self._come.wait() if self._is_empty else asyncio.sleep(0))
            self._come.clear()
            messages = self._take(_MOST_AT_ONCE)
            self._is_empty = len(messages) < _MOST_AT_ONCE
            if messages:
                return messages

    async def __aenter__(self) -> "AsyncInbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.remove_reader(self._descriptor)
        self.close()


class Outbox:
    """Sends to any inbox without blocking. One thread, or one event loop, uses one outbox."""

    def __init__(self, key: ChannelKey | None = None) -> None:
        """Inboxes with a key take messages only from an outbox with the same."""
        self._context = zmq.Context()
        self._key = key
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._used_s: dict[str, float] = {}
        self._packed: Message | None = None
        """The last message, which may be sent to others too: both legs get the same prompt."""
        self._frame = b""

    def send(self, address: str, message: Message) -> None:
        """Queue one message.

        Raises:
            PeerUnreachableError: the queue to this address is full, so nobody has read from it for long; or the
                message is larger than a frame may be.
        """
        self.broadcast([address], message)

    def broadcast(self, addresses: Iterable[str], message: Message) -> None:
        """Queue one message for several peers; it is packed once, also when it is sent again after this.

        Raises:
            PeerUnreachableError: as ``send``; those after the first such address get nothing.
        """
        if message is not self._packed:
            self._packed, self._frame = message, encode(message)
        if len(self._frame) > MAX_FRAME_BYTES:
            kind = type(message).__name__
            raise PeerUnreachableError(f"{kind} of {len(self._frame)} bytes; allowed: {MAX_FRAME_BYTES} in one message")
        now_s = time.monotonic()
        for address in addresses:
            try:
                self._socket(address, now_s).send(self._frame, zmq.NOBLOCK)
            except zmq.Again:
                raise PeerUnreachableError(f"nobody reads at {address}; {type(message).__name__} not sent") from None

    def forget(self, address: str) -> None:
        """Drop the connection to a peer that is gone, with what was still queued for it."""
        socket = self._sockets.pop(address, None)
        if socket is not None:
            del self._used_s[address]
            socket.close(linger=0)

    def close(self) -> None:
        """Give queued messages a moment to leave, then close; safe to call twice."""
        for socket in self._sockets.values():
            socket.close(linger=_LINGER_MS)
        self._sockets.clear()
        self._used_s.clear()
        self._context.term()

    def _socket(self, address: str, now_s: float) -> "zmq.Socket[bytes]":
        if address not in self._sockets:
            for idle in [known for known, used_s in self._used_s.items() if used_s < now_s - _IDLE_S]:
                self.forget(idle)
            socket = self._context.socket(zmq.PUSH)
            _limit(socket)
            socket.setsockopt(zmq.SNDHWM, 10_000)
            if self._key is not None:
                socket.curve_serverkey = self._key.public
                socket.curve_publickey = self._key.public
                socket.curve_secretkey = self._key.secret
            socket.connect(address)
            self._sockets[address] = socket
        self._used_s[address] = now_s
        return self._sockets[address]


class _Doorkeeper:
    """Tells ZeroMQ who may connect to a socket, by ZAP (RFC 27), and counts who may not; on a thread that ends with it.

    Who does not know the public key fails before anybody is asked, so the socket's own events are what is counted.
    """

    def __init__(self, context: zmq.Context[Any], guarded: "zmq.Socket[bytes]", public: bytes) -> None:
        self.num_refused = 0
        self._allowed = zmq.utils.z85.decode(public)
        self._asked: zmq.Socket[bytes] = context.socket(zmq.REP, socket_class=zmq.Socket)
        self._asked.linger = 0
        self._asked.bind("inproc://zeromq.zap.01")
        guarded.monitor(_REFUSALS_AT, _REFUSALS)
        self._refusals: zmq.Socket[bytes] = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._refusals.linger = 0
        self._refusals.connect(_REFUSALS_AT)
        threading.Thread(target=self._run, name="doorkeeper", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        with self._asked, self._refusals, contextlib.suppress(zmq.ContextTerminated):
            poller.register(self._asked, zmq.POLLIN)
            poller.register(self._refusals, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._asked in ready:
                    self._answer()
                if self._refusals in ready:
                    self._refusals.recv_multipart()
                    self.num_refused += 1

    def _answer(self) -> None:
        version, request, *_, mechanism, credential = self._asked.recv_multipart()
        is_member = mechanism == b"CURVE" and credential == self._allowed
        code, text = (b"200", b"OK") if is_member else (b"400", b"stranger")
        self._asked.send_multipart([version, request, code, text, b"", b""])


def _limit(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, _HARD_LIMIT_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, 0)
