"""What is written to a client, and in how many pieces."""

import asyncio
from typing import Any

import pytest

from router.http_protocol import JoiningTransport

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def test_a_head_leaves_with_what_follows_it() -> None:
    joining = JoiningTransport(wire := Wire())
    for data in (HEAD, b"ab", HEAD, b"cd", b"ef"):
        joining.write(data)
    await asyncio.sleep(0)
    assert wire.written == [HEAD + b"ab", HEAD + b"cd", b"ef"]


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_head_alone_waits_for_nothing(head: bytes) -> None:
    joining = JoiningTransport(wire := Wire())
    joining.write(head)
    await asyncio.sleep(0)
    assert wire.written == [head]


async def test_a_head_leaves_before_the_connection_is_closed() -> None:
    joining = JoiningTransport(wire := Wire())
    joining.write(HEAD)
    joining.close()
    await asyncio.sleep(0)
    assert (wire.written, joining.is_closing()) == ([HEAD], True)


async def test_nothing_is_written_to_a_client_that_has_left() -> None:
    joining = JoiningTransport(wire := Wire())
    joining.write(HEAD)
    wire.close()
    await asyncio.sleep(0)
    assert wire.written == []
