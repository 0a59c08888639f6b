"""The clients of the router benchmark see the end of a reply, and its tokens, however its bytes are cut."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.http_load import Connection, LoadError, request_of

HEAD = b"HTTP/1.1 200 OK\r\nserver: x\r\n"
BODY = b'{"data: {": 0}'
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
EVENTS = [b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\ndata: {"a": 3}\n\n', b"data: [DONE]\n\n"]
STREAM = HEAD + b"transfer-encoding: chunked\r\n\r\n"
STREAM += b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"


class Transport:
    """Answers a request with these pieces, one after the other."""

    def __init__(self, connection: Connection, pieces: list[bytes]) -> None:
        self.connection = connection
        self.pieces = pieces

    def write(self, data: bytes) -> None:
        assert data == b"a request"
        for piece in self.pieces:
            self.connection.data_received(piece)


def ask(reply: bytes, cuts: list[int]) -> Connection:
    async def run() -> Connection:
        connection = Connection()
        edges = [0, *sorted(min(cut, len(reply)) for cut in cuts), len(reply)]
        pieces = [reply[start:end] for start, end in pairwise(edges) if start < end]
        transport: Any = Transport(connection, pieces)
        connection.connection_made(transport)
        await asyncio.wait_for(connection.ask(b"a request"), 10)
        return connection

    return asyncio.run(run())


@given(st.lists(st.integers(0, 300), max_size=8))
def test_a_stream_is_counted_by_its_tokens(cuts: list[int]) -> None:
    assert ask(STREAM, cuts).num_tokens == 3


@given(st.lists(st.integers(0, 100), max_size=5))
def test_a_whole_answer_ends_with_its_length(cuts: list[int]) -> None:
    assert ask(WHOLE, cuts).num_tokens == 0


def test_another_status_is_an_error() -> None:
    with pytest.raises(LoadError, match=r"HTTP/1\.1 503 x"):
        ask(b"HTTP/1.1 503 x\r\ncontent-length: 2\r\n\r\nno", [])


def test_a_request_is_whole() -> None:
    assert request_of("http://a:1", "/p", {"x": [1]}) == (
        b"POST /p HTTP/1.1\r\nHost: a:1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n" + b'{"x":[1]}'
    )
