"""A stream to a client: what happens when the client stalls."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import Message

from cluster.http.cycle import LEFT_KEY, Departure
from router.answer import Answer
from router.connection import EventStream, event
from tests.fakes.dispatching import ask


class Reader:
    """Client that accepts a number of messages and then blocks."""

    def __init__(self, num_taken: int) -> None:
        self.num_taken = num_taken
        self.sent: list[Message] = []
        self.departure = Departure()

    async def send(self, message: Message) -> None:
        if len(self.sent) == self.num_taken:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def read(self, stream: EventStream) -> None:
        """Call the stream as an ASGI application."""
        await stream({"type": "http", LEFT_KEY: self.departure}, self._receive, self.send)

    async def _receive(self) -> Message:
        raise AssertionError("the body has been read")


async def frames(_: Answer) -> AsyncGenerator[bytes, None]:
    for number in range(3):
        yield event(str(number).encode())


def stream_of(left: list[object]) -> EventStream:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Answer, None]:
        with Answer([ask()], lambda _: None, left.append) as answer:
            yield answer

    return EventStream(opened(), frames, lambda error: str(error).encode())


async def test_the_answer_to_a_stalled_client_that_is_disconnected_is_cancelled() -> None:
    for num_taken in (0, 1, 2):
        left: list[object] = []
        reader = Reader(num_taken)
        asyncio.get_running_loop().call_later(0.01, reader.departure.happen)
        await reader.read(stream_of(left))
        assert len(left) == 1
        assert len(reader.sent) == num_taken


async def test_a_client_that_reads_gets_everything() -> None:
    left: list[object] = []
    reader = Reader(100)
    await reader.read(stream_of(left))
    assert [message.get("body") for message in reader.sent[1:]] == [
        b"data: 0\n\n",
        b"data: 1\n\n",
        b"data: 2\n\n",
        b"",
    ]
    assert len(left) == 1
