"""Typed messages between processes: MessagePack over ZeroMQ PUSH and PULL. The only file that imports zmq.

With a key, CURVE (RFC 26) encrypts connections and authenticates both ends; see docs/security.md.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
import zmq
import zmq.utils.z85

from cluster.spec import wire
from cluster.spec.errors import PeerLostError, PeerUnreachableError
from cluster.spec.messages import Message
from cluster.spec.wire import from_wire, to_wire
from cluster.spec.worker_spec import ChannelKey

_log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Maximum size of a sent or accepted frame; 64 MiB holds a prompt of about ten million tokens."""

_HARD_LIMIT_BYTES = 2 * MAX_FRAME_BYTES
"""Frame size beyond which ZeroMQ closes the connection without allocating memory for the frame."""
_LINGER_MS = 1000
_IDLE_S = 60.0
"""Idle time after which a connection is dropped when a new one is made, since its peer is probably gone."""
_REFUSALS_AT = "inproc://refusals"
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_MOST_AT_ONCE = 512
"""Maximum number of messages per call on an event loop, so that other tasks get to run."""

encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder(enc_hook=to_wire).encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=from_wire)


def decode(frame: bytes) -> Message:
    """Decode one frame. Raises msgspec.DecodeError if it is not a message."""
    return wire.decode(_decoder, frame)


def draw_key() -> ChannelKey:
    public, secret = zmq.curve_keypair()
    return ChannelKey(public=public, secret=secret)


class _Pull:
    """Listening socket that counts dropped messages and connections."""

    def __init__(self, host: str, key: ChannelKey | None = None) -> None:
        """Listen on a host; with a key, accept only peers that hold it."""
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
        """Numbers of dropped frames, ``malformed`` or too ``large``, and of refused connections, ``stranger``."""
        strangers = 0 if self._doorkeeper is None else self._doorkeeper.num_refused
        return self._dropped + Counter(stranger=strangers)

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._socket.close(linger=0)
        self._context.term()

    def _take(self, most: int) -> list[Message]:
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
        """Return the message in a frame; count an invalid frame and return None."""
        if len(frame) > MAX_FRAME_BYTES:
            self._dropped["large"] += 1
            return None
        try:
            return decode(frame)
        except msgspec.DecodeError:
            self._dropped["malformed"] += 1
            return None


class Inbox(_Pull):
    """Receiving end of one process. Messages from one sender arrive in order."""

    def receive(self, timeout_s: float, most: int = sys.maxsize) -> list[Message]:
        """Return up to ``most`` messages that have arrived; wait up to the timeout for the first."""
        return self._take(most) if self._socket.poll(int(timeout_s * 1000)) else []


class AsyncInbox(_Pull):
    """Inbox for an event loop; must be created inside the running loop."""

    def __init__(self, host: str, key: ChannelKey | None = None) -> None:
        super().__init__(host, key)
        self._arrived = asyncio.Event()
        self._is_empty = False
        self._loop = asyncio.get_running_loop()
        # The descriptor becomes readable when the socket's state changes, and stays so until the socket is read.
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._arrived.set)

    async def receive(self) -> list[Message]:
        """Return up to `_MOST_AT_ONCE` messages; wait for the first, and always let other tasks run."""
        while True:
            # The descriptor signals only messages that arrive once the socket is empty.
            await (self._arrived.wait() if self._is_empty else asyncio.sleep(0))
            self._arrived.clear()
            messages = self._take(_MOST_AT_ONCE)
            self._is_empty = len(messages) < _MOST_AT_ONCE
            if messages:
                return messages

    async def __aenter__(self) -> "AsyncInbox":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.remove_reader(self._descriptor)
        self.close()


class Outbox:
    """Non-blocking sender to any inbox, for use by one thread."""

    def __init__(self, key: ChannelKey | None = None) -> None:
        """Create an outbox. With a key, it reaches only inboxes with the same key."""
        self._context = zmq.Context()
        self._key = key
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._used_s: dict[str, float] = {}
        self._packed: Message | None = None
        """Last encoded message, cached because prefill and decode get the same prompt."""
        self._frame = b""

    def send(self, address: str, message: Message) -> None:
        """Queue one message.

        Raises:
            PeerUnreachableError: the queue is full because the peer does not read, or the message is too large.
        """
        self.broadcast([address], message)

    def broadcast(self, addresses: Iterable[str], message: Message) -> None:
        """Queue one message for several peers, encoding it once.

        Raises:
            PeerUnreachableError: see ``send``; the remaining addresses get nothing.
        """
        if message is not self._packed:
            self._packed, self._frame = message, encode(message)
        if len(self._frame) > MAX_FRAME_BYTES:
            kind = type(message).__name__
            raise PeerUnreachableError(f"{kind} has {len(self._frame)} bytes; allowed: at most {MAX_FRAME_BYTES}")
        now_s = time.monotonic()
        for address in addresses:
            try:
                self._socket(address, now_s).send(self._frame, zmq.NOBLOCK)
            except zmq.Again:
                raise PeerUnreachableError(
                    f"no process is listening at {address}; {type(message).__name__} not sent"
                ) from None

    def forget(self, address: str) -> None:
        """Drop the connection to a lost peer, and all messages queued for it."""
        socket = self._sockets.pop(address, None)
        if socket is not None:
            del self._used_s[address]
            socket.close(linger=0)

    def close(self) -> None:
        """Close, after a short wait for queued messages to leave; safe to call twice."""
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


class Post(Protocol):
    """Sender of messages to one address at a time; implemented by ``Outbox``."""

    def send(self, address: str, message: Message) -> None: ...
    def close(self) -> None: ...


def send_or_log(post: Post, address: str, message: Message) -> None:
    """Send a message. If the peer is not listening, only log it, because leases and deadlines handle lost peers."""
    try:
        post.send(address, message)
    except PeerUnreachableError as error:
        _log.warning("%s", error)


def send_to_ranks(outbox: Outbox, addresses: Iterable[str], message: Message) -> None:
    """Send to other ranks of the same replica. Raises PeerLostError if one of them is no longer listening."""
    try:
        outbox.broadcast(addresses, message)
    except PeerUnreachableError as error:
        raise PeerLostError(str(error)) from error


class _Doorkeeper:
    """Thread that authenticates a socket's peers for ZeroMQ, using ZAP (RFC 27), and counts refusals.

    Refusals are counted from socket events, because a peer without the public key fails before ZAP is consulted.
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
