"""Transports of HTTP responses: heads are sent with bodies, and HTTP/1.0 gets no chunks."""

import asyncio

import pytest

from cluster.http_transports import JoiningTransport, UnchunkedTransport
from tests.fakes.wire import Wire

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


def join(wire: Wire) -> JoiningTransport:
    return JoiningTransport(wire, lambda head: head, wire.close)


async def test_a_head_is_sent_with_the_first_body_chunk() -> None:
    joining = join(wire := Wire())
    for data in (HEAD, b"ab", HEAD, b"cd", b"ef"):
        joining.write(data)
    await asyncio.sleep(0)
    assert wire.written == [HEAD + b"ab", HEAD + b"cd", b"ef"]


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_head_without_a_body_is_sent_immediately(head: bytes) -> None:
    joining = join(wire := Wire())
    joining.write(head)
    await asyncio.sleep(0)
    assert wire.written == [head]


async def test_a_head_is_sent_before_the_connection_is_closed() -> None:
    joining = join(wire := Wire())
    joining.write(HEAD)
    joining.close()
    await asyncio.sleep(0)
    assert (wire.written, joining.is_closing()) == ([HEAD], True)


async def test_nothing_is_written_to_a_disconnected_client() -> None:
    joining = join(wire := Wire())
    joining.write(HEAD)
    wire.close()
    await asyncio.sleep(0)
    assert wire.written == []


async def test_an_unchunked_answer_ends_with_the_connection() -> None:
    transport = UnchunkedTransport(wire := Wire())
    for data in (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n"):
        transport.write(data)
    assert wire.written == [b"HTTP/1.1 200 OK\r\n\r\n", b"abc", b""]
