"""A client's connection: how writes are batched, and what happens when the client stalls."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from router import connection
from router.answer import Answer
from router.connection import EventStream, HttpProtocol, JoiningTransport, event
from tests.fakes.dispatching import ask


class Reader:
    """Client that accepts a number of messages and then blocks."""

    def __init__(self, num_taken: int) -> None:
        self.num_taken = num_taken
        self.sent: list[Message] = []

    async def send(self, message: Message) -> None:
        if len(self.sent) == self.num_taken:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def frames(_: Answer) -> AsyncGenerator[bytes, None]:
    for number in range(3):
        yield event(str(number).encode())


def stream_of(left: list[object]) -> EventStream:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Answer, None]:
        with Answer([ask()], lambda _: None, left.append) as answer:
            yield answer

    return EventStream(opened(), frames, lambda error: str(error).encode())


async def test_a_stalled_client_is_disconnected_and_its_answer_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SLOW_READER_S", 0.01)
    for num_taken in (0, 1, 2):
        left: list[object] = []
        reader = Reader(num_taken)
        await stream_of(left)({"type": "http"}, reader.receive, reader.send)
        assert len(left) == 1
        assert len(reader.sent) == num_taken


async def test_a_client_that_reads_gets_everything() -> None:
    left: list[object] = []
    reader = Reader(100)
    await stream_of(left)({"type": "http"}, reader.receive, reader.send)
    assert [message.get("body") for message in reader.sent[1:]] == [
        b"data: 0\n\n",
        b"data: 1\n\n",
        b"data: 2\n\n",
        b"",
    ]
    assert len(left) == 1


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire(asyncio.Transport):
    """Transport that records what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written.append(data)

    def pause_reading(self) -> None:
        """Do nothing, because no data arrives by itself."""

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def test_a_head_is_sent_with_the_first_body_chunk() -> None:
    joining = JoiningTransport(wire := Wire())
    for data in (HEAD, b"ab", HEAD, b"cd", b"ef"):
        joining.write(data)
    await asyncio.sleep(0)
    assert wire.written == [HEAD + b"ab", HEAD + b"cd", b"ef"]


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_head_without_a_body_is_sent_immediately(head: bytes) -> None:
    joining = JoiningTransport(wire := Wire())
    joining.write(head)
    await asyncio.sleep(0)
    assert wire.written == [head]


async def test_a_head_is_sent_before_the_connection_is_closed() -> None:
    joining = JoiningTransport(wire := Wire())
    joining.write(HEAD)
    joining.close()
    await asyncio.sleep(0)
    assert (wire.written, joining.is_closing()) == ([HEAD], True)


async def test_nothing_is_written_to_a_disconnected_client() -> None:
    joining = JoiningTransport(wire := Wire())
    joining.write(HEAD)
    wire.close()
    await asyncio.sleep(0)
    assert wire.written == []


IDLE_S = 0.1
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def _say_ok(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond after longer than an idle connection is kept open."""
    del scope, receive
    await asyncio.sleep(2 * IDLE_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def _connect() -> tuple[HttpProtocol, Wire]:
    config = uvicorn.Config(_say_ok, lifespan="off", log_config=None, timeout_keep_alive=IDLE_S)  # type: ignore[arg-type]
    config.load()
    protocol = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(wire := Wire())
    return protocol, wire


async def _settle(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("said", [b"", b"\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "a line", "half"])
async def test_an_endless_request_head_closes_the_connection(said: bytes) -> None:
    protocol, wire = _connect()
    if said:
        protocol.data_received(said)
    assert not wire.is_closed
    await _settle(lambda: wire.is_closed)
    assert not wire.written


async def test_a_connection_with_a_pending_answer_stays_open() -> None:
    protocol, wire = _connect()
    for _ in range(2):
        wire.written.clear()
        protocol.data_received(REQUEST + REQUEST)
        await _settle(lambda: b"".join(wire.written).count(b"\r\n\r\nok") == 2)
        assert not wire.is_closed
    await _settle(lambda: wire.is_closed)
