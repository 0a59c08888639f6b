"""Messages over real sockets: only peers with the key are admitted, and invalid messages do no harm."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from cluster import channel
from cluster.channel import MAX_FRAME_BYTES, AsyncInbox, Inbox, Outbox, draw_key, encode
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.messages import CheckHealth, Drain, Message
from cluster.spec.worker_spec import ChannelKey, Rendezvous

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"
WAIT_S = 60.0
KEY = draw_key()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with closing(Inbox(HOST, KEY)) as inbox:
        yield inbox


def send(address: str, message: Message, key: ChannelKey | None) -> None:
    with closing(Outbox(key)) as outbox:
        outbox.send(address, message)


def receive(inbox: Inbox, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        arrived = inbox.receive(WAIT_S)
        assert arrived, f"{len(messages)} of {count} messages came"
        messages += arrived
    return messages


def wait_dropped(inbox: Inbox, why: str) -> None:
    """Wait until a message has been dropped for a reason. No valid message may arrive."""
    for _ in range(int(WAIT_S * 10)):
        if inbox.dropped[why]:
            return
        assert inbox.receive(0.1) == []
    raise AssertionError(f"nothing {why} was dropped: {inbox.dropped}")


def raw_sender(
    address: str, key: ChannelKey | None, context: "zmq.Context[zmq.Socket[bytes]]", server: bytes | None = None
) -> "zmq.Socket[bytes]":
    """Return a socket like an outbox's for arbitrary bytes. ``server`` is the public key that it expects."""
    pusher = context.socket(zmq.PUSH)
    pusher.linger = 0
    if key is not None:
        pusher.curve_publickey, pusher.curve_secretkey = key.public, key.secret
        pusher.curve_serverkey = server or key.public
    pusher.connect(address)
    return pusher


def test_members_reach_each_other(inbox: Inbox) -> None:
    with closing(Outbox(KEY)) as outbox:
        for number in range(100):
            outbox.send(inbox.address, CheckHealth(reply_to=str(number)))
        assert receive(inbox, 100) == [CheckHealth(reply_to=str(number)) for number in range(100)]
    assert not +inbox.dropped


def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch, inbox: Inbox) -> None:
    """Otherwise connections to all former peers would keep their descriptors."""
    now_s = 0.0
    monkeypatch.setattr("cluster.channel.time.monotonic", lambda: now_s)
    with closing(Outbox(KEY)) as outbox:
        counts = []
        for number in range(30):
            now_s = 50.0 * number
            with closing(Inbox(HOST, KEY)) as gone:
                outbox.send(gone.address, Drain())
            outbox.send(inbox.address, CheckHealth(reply_to=str(number)))
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
        assert max(counts) < counts[0] + len(counts) / 2
        assert receive(inbox, 30) == [CheckHealth(reply_to=str(number)) for number in range(30)]
        now_s += 1000.0
        outbox.send("tcp://127.0.0.1:1", Drain())
        outbox.send(inbox.address, Drain())
        assert receive(inbox, 1) == [Drain()]


def test_an_event_loop_takes_messages_of_members() -> None:
    async def talk() -> list[Message]:
        async with AsyncInbox(HOST, KEY) as inbox:
            await asyncio.to_thread(send, inbox.address, Drain(), KEY)
            return await asyncio.wait_for(inbox.receive(), WAIT_S)

    assert asyncio.run(talk()) == [Drain()]


def test_a_sender_with_another_key_is_refused_and_counted(inbox: Inbox) -> None:
    """The stranger may even know the public half of the key."""
    stranger = draw_key()
    with zmq.Context() as context, raw_sender(inbox.address, stranger, context, KEY.public) as pusher:
        pusher.send(encode(CheckHealth(reply_to="evil")))
        wait_dropped(inbox, "stranger")
    send(inbox.address, Drain(), KEY)
    assert receive(inbox, 1) == [Drain()]


@pytest.mark.parametrize("key", [None, draw_key()])
def test_senders_without_the_key_are_dropped_and_counted(inbox: Inbox, key: ChannelKey | None) -> None:
    with zmq.Context() as context, raw_sender(inbox.address, key, context) as pusher:
        pusher.send(encode(CheckHealth(reply_to="evil")))
        wait_dropped(inbox, "stranger")
        send(inbox.address, Drain(), KEY)
        assert receive(inbox, 1) == [Drain()]
        assert inbox.receive(0.2) == []


def test_a_port_scanner_does_no_harm(inbox: Inbox) -> None:
    host, _, port = inbox.address.removeprefix("tcp://").partition(":")
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b""):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    send(inbox.address, Drain(), KEY)
    assert receive(inbox, 1) == [Drain()]


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa4type\xa4Evil", b"\x91" * 100_000])
def test_an_invalid_frame_is_dropped_and_counted(inbox: Inbox, frame: bytes) -> None:
    with zmq.Context() as context, raw_sender(inbox.address, KEY, context) as pusher:
        pusher.send(frame)
        wait_dropped(inbox, "malformed")
        pusher.send(encode(Drain()))
        assert receive(inbox, 1) == [Drain()]


def test_a_frame_over_the_limit_is_dropped_and_counted(inbox: Inbox) -> None:
    with zmq.Context() as context, raw_sender(inbox.address, KEY, context) as pusher:
        pusher.send(encode(CheckHealth(reply_to="x" * MAX_FRAME_BYTES)))
        wait_dropped(inbox, "large")
        pusher.send(encode(Drain()))
        assert receive(inbox, 1) == [Drain()]


def test_an_endless_frame_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame's memory is never allocated. The connection ends, with all later messages."""
    monkeypatch.setattr(channel, "_HARD_LIMIT_BYTES", 1 << 20)
    with (
        closing(Inbox(HOST, KEY)) as strict,
        zmq.Context() as context,
        raw_sender(strict.address, KEY, context) as pusher,
    ):
        with pusher.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            pusher.send(encode(CheckHealth(reply_to="x" * (1 << 19))))
            assert len(receive(strict, 1)) == 1
            assert not monitor.poll(0)
            pusher.send(encode(CheckHealth(reply_to="x" * (2 << 20))))
            assert monitor.poll(int(WAIT_S * 1000))
            pusher.disable_monitor()
        assert strict.receive(0.1) == []


def test_a_message_over_the_limit_is_not_sent(inbox: Inbox) -> None:
    with closing(Outbox(KEY)) as outbox:
        with pytest.raises(
            PeerUnreachableError, match=f"^CheckHealth has .* bytes; allowed: at most {MAX_FRAME_BYTES}"
        ):
            outbox.send(inbox.address, CheckHealth(reply_to="x" * MAX_FRAME_BYTES))
        outbox.send(inbox.address, Drain())
        assert receive(inbox, 1) == [Drain()]


def test_secrets_are_not_printed() -> None:
    shown = repr(Rendezvous(bootstrap_url="http://nowhere", token="hush", channel_key=KEY))
    assert "hush" not in shown
    assert KEY.secret.decode() not in shown
