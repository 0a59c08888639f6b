"""Reading of HTTP connections in turns: what waits, what is paused, and how much is taken meanwhile."""

import asyncio
from typing import Any, cast

import pytest

from cluster.http import crowd as http_crowd
from cluster.http.connection import BoundedHttpProtocol
from cluster.http.crowd import MAX_WAITING_READS, Crowd
from cluster.http.reader import Reader
from tests.fakes.wire import Wire


class Flow:
    read_paused = False


class Protocol:
    """Protocol that records what it reads."""

    def __init__(self) -> None:
        self.address = "client"
        self.flow = Flow()
        self.received: list[bytes] = []
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = exc is None

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def eof_received(self) -> None: ...


class Connection:
    def __init__(self) -> None:
        self.protocol, self.wire = Protocol(), Wire()
        self.reader = Reader(cast(BoundedHttpProtocol, self.protocol))
        self.reader.connection_made(self.wire)

    def send(self, data: bytes) -> int:
        """Send what fits; return its length. A paused connection takes nothing from the kernel."""
        assert not self.wire.is_paused
        buffer = self.reader.get_buffer(-1)
        sent = data[: len(buffer)]
        buffer[: len(sent)] = sent
        self.reader.buffer_updated(len(sent))
        return len(sent)


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the first read of a pass take all the time that reading may take."""
    monkeypatch.setattr(http_crowd, "MAX_READ_S", 1e-9)


async def test_what_arrives_is_read_at_once() -> None:
    connection = Connection()
    connection.send(b"abc")
    connection.send(b"def")
    assert connection.protocol.received == [b"abc", b"def"]


@pytest.mark.usefixtures("no_time")
async def test_a_connection_that_waits_for_its_turn_is_paused() -> None:
    await asyncio.sleep(0)
    Crowd.of(asyncio.get_running_loop())._left_s = 0.0
    connection = Connection()
    connection.send(b"abc")
    assert connection.wire.is_paused
    assert connection.protocol.received == []
    await asyncio.sleep(0)
    assert connection.protocol.received == [b"abc"]
    assert not connection.wire.is_paused


@pytest.mark.usefixtures("no_time")
async def test_a_connection_whose_request_is_full_stays_paused_after_its_turn() -> None:
    Crowd.of(asyncio.get_running_loop())._left_s = 0.0
    connection = Connection()
    connection.send(b"abc")
    connection.protocol.flow.read_paused = True
    await asyncio.sleep(0)
    assert connection.protocol.received == [b"abc"]
    assert connection.wire.is_paused


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize("is_lost", [True, False])
async def test_nothing_is_read_after_the_end(is_lost: bool) -> None:
    Crowd.of(asyncio.get_running_loop())._left_s = 0.0
    connection = Connection()
    connection.send(b"abc")
    connection.wire.close()
    if is_lost:
        connection.reader.connection_lost(None)
    await asyncio.sleep(0)
    assert connection.protocol.received == []
    assert connection.protocol.is_lost == is_lost


@pytest.mark.usefixtures("no_time")
async def test_little_is_taken_from_each_connection_while_many_wait() -> None:
    Crowd.of(asyncio.get_running_loop())._left_s = 0.0
    data = b"x" * 50_000
    assert [Connection().send(data) for _ in range(MAX_WAITING_READS + 3)] == [50_000] * MAX_WAITING_READS + [1024] * 3
