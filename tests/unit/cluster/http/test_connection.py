"""A client's HTTP connection: what a request may cost, and how a refused client is told."""

import asyncio
import gc
import weakref
from collections.abc import Iterable

import pytest

from cluster.http import connection as http_connection
from cluster.http.connection import MAX_PIPELINED
from cluster.http.crowd import Crowd
from cluster.http.refusal import MAX_HEAD_BYTES
from tests.fakes.http_connection import IDLE_S, Connection, post, settle


def cut(data: bytes, size: int) -> Iterable[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = post("/", "transfer-encoding: chunked")
BIG = b"x" * (MAX_HEAD_BYTES + 1)
LARGE_HEADS = {
    "one line": b"GET / HTTP/1.1\r\na: " + BIG,
    "many lines": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    "url": b"GET /" + BIG,
    "method": b"G" * 3 + BIG,
    "blank lines": b"\r\n" * 40_000,
    "complete": b"GET / HTTP/1.1\r\na: " + BIG + b"\r\n\r\n",
    "with a body": post("/", f"a: {BIG.decode()}", "content-length: 3") + b"abc",
    "an offer": post("/", f"a: {BIG.decode()}", "connection: upgrade", "upgrade: h2c"),
    "trailer": CHUNKED + b"1\r\na\r\n0\r\na: " + BIG * 3,
    "complete trailer": CHUNKED + b"1\r\na\r\n0\r\na: " + BIG + b"\r\n\r\n",
    "chunk extension": CHUNKED + b"1;a=" + BIG * 3,
}


@pytest.mark.parametrize("size", [1000, 80_000])
@pytest.mark.parametrize("name", LARGE_HEADS)
async def test_a_head_above_the_limit_is_refused(name: str, size: int) -> None:
    connection = Connection()
    connection.send(*cut(LARGE_HEADS[name], size))
    said = await connection.refusal()
    if name == "method":
        assert said.startswith("400 Bad Request|bad_request: the request is not valid: ")
    else:
        code = "too_many_headers" if name == "many lines" else "head_too_large"
        assert said.startswith(f"431 Request Header Fields Too Large|{code}: ")
        assert said.endswith("more than 128 headers" if name == "many lines" else "larger than 65536 bytes")


async def test_a_head_above_the_limit_is_refused_after_the_answers_before_it() -> None:
    connection = Connection()
    connection.send(GET + post("/unread") + LARGE_HEADS["complete"])
    assert (await connection.refusal(num_before=2)).startswith("431 ")
    assert [said[:3] for said in await connection.answers()] == ["200", "200", "431"]


@pytest.mark.parametrize("size", [999, 1 << 20])
async def test_heads_within_the_limit_and_long_bodies_are_accepted(size: int) -> None:
    connection = Connection()
    connection.protocol.body_s = 10.0
    head = post("/", "content-length: 100000", f"a: {'x' * (MAX_HEAD_BYTES - 100)}")
    chunks = b"".join(b"%x\r\n%b\r\n" % (length, b"y" * length) for length in [1] * 30_000 + [70_000])
    trailer = b"0\r\nauthorization: x\r\n\r\n"
    for data, said in (
        (head + b"z" * 100_000, "200 OK|read 100000."),
        (CHUNKED + chunks + trailer, "200 OK|read 100000."),
    ):
        connection.wire.written.clear()
        for packet in cut(data, size):
            connection.send(packet)
            await asyncio.sleep(0)
        assert await connection.answers() == [said]
    assert not connection.wire.is_closed


async def test_a_client_that_leaves_is_noticed_although_another_request_waits() -> None:
    connection = Connection()
    connection.send(post("/wait"), *[GET] * (MAX_PIPELINED - 1))
    await asyncio.sleep(0)
    assert not connection.wire.is_paused
    connection.send(GET)
    assert connection.wire.is_paused
    connection.protocol.connection_lost(None)
    await settle(lambda: not connection.state.tasks)


async def test_an_unknown_transfer_encoding_is_refused() -> None:
    connection = Connection()
    connection.send(post("/", "transfer-encoding: gzip, chunked"))
    said = await connection.refusal()
    assert said.startswith("501 Not Implemented|unsupported_encoding: the transfer encoding b'gzip, chunked' is not")


async def test_more_pipelined_requests_than_the_limit_are_refused() -> None:
    connection = Connection()
    connection.send(GET * 2000)
    said = await connection.refusal(num_before=MAX_PIPELINED + 1)
    assert said == "429 Too Many Requests|too_many_requests: more than 8 requests wait on one connection"


async def test_a_connection_without_a_request_is_closed() -> None:
    connection = Connection()
    await settle(lambda: connection.wire.is_closed)
    assert not connection.wire.written


@pytest.mark.parametrize("said", [b"\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n"], ids=["a line", "half"])
async def test_an_endless_request_head_times_out(said: bytes) -> None:
    connection = Connection()
    for packet in cut(said, 10):
        connection.send(packet)
    assert not connection.wire.is_closed
    said_last = await connection.refusal()
    assert said_last == "408 Request Timeout|head_timeout: the request head did not arrive within 0.1 s"


async def test_a_trickling_head_has_a_deadline_of_its_own() -> None:
    connection = Connection()
    connection.protocol.timeout_keep_alive = 3600
    connection.send(GET)
    await connection.answers()
    while not connection.wire.has_eof:
        connection.send(b"\r\n")
        await asyncio.sleep(IDLE_S / 5)


@pytest.mark.parametrize("sent", [b"", b"a"], ids=["no body", "trickling"])
@pytest.mark.parametrize("head", [post("/", "content-length: 999"), GET[:-2] + b"content-length: 999\r\n\r\n"])
async def test_an_incomplete_body_times_out(head: bytes, sent: bytes) -> None:
    connection = Connection()
    connection.send(head)
    while not connection.wire.has_eof:
        connection.send(sent)
        await asyncio.sleep(IDLE_S / 5)
    assert (
        await connection.refusal() == "408 Request Timeout|body_timeout: the request body did not arrive within 0.1 s"
    )
    await settle(lambda: not connection.state.tasks)


async def test_a_body_that_no_route_reads_has_a_deadline_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.01)
    monkeypatch.setattr(http_connection, "MAX_DISCARDED_BYTES", 5000)
    for seconds, size in ((4 * IDLE_S, 0), (3600.0, 1000)):  # longer than the route takes
        connection = Connection()
        connection.protocol.body_s = seconds
        connection.protocol.timeout_keep_alive = 3600
        connection.send(post("/", "content-length: 3") + b"abc" + post("/unread", "content-length: 99999"))
        assert await connection.answers(2) == ["200 OK|read 3.", "200 OK|read 0."]
        while not connection.wire.is_closed:
            connection.send(b"x" * size)
            await asyncio.sleep(0)
        assert len(await connection.answers()) == 2


async def test_an_unread_body_waits_in_the_socket() -> None:
    connection = Connection()
    connection.send(post("/unread", "content-length: 999999"), b"x" * 65_537)
    assert connection.wire.is_paused
    await connection.answers()
    assert not connection.wire.is_paused


@pytest.mark.parametrize("begun", [b"", b"GET"], ids=["idle", "half a head"])
async def test_a_connection_with_a_pending_answer_stays_open(begun: bytes) -> None:
    connection = Connection()
    if begun:
        connection.protocol.timeout_keep_alive = 0  # the head has a limit of its own
    connection.send(post("/unread") + post("/unread") + begun)
    first, second, *_ = await connection.answers(2)
    assert [first, second] == ["200 OK|read 0."] * 2
    await settle(lambda: connection.wire.is_closed)
    *_, last = await connection.answers(3 if begun else 2)
    assert last.startswith("408 Request Timeout|head_timeout" if begun else "200 OK")
    assert connection.wire.text.count("HTTP/1.1 ") == (3 if begun else 2)


@pytest.mark.parametrize("end", ["time", "bytes", "client"])
async def test_a_refused_client_can_read_why_while_it_sends(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.05 if end == "time" else 3600.0)
    connection = Connection()
    connection.send(post("/refused", "expect: 100-continue", "content-length: 999999999"))
    assert await connection.refusal() == "401 Unauthorized|read 0."
    if end == "bytes":
        connection.send(*[b"x" * (1 << 20)] * 65)
        assert connection.wire.is_closed
    elif end == "time":
        await settle(lambda: connection.wire.is_closed)
    connection.protocol.connection_lost(None)


async def test_a_refusal_after_the_whole_body_keeps_the_connection() -> None:
    connection = Connection()
    connection.protocol.timeout_keep_alive = 3600
    connection.send(post("/refused", "content-length: 3") + b"abc")
    assert await connection.answers() == ["401 Unauthorized|read 0."]
    connection.send(GET)
    assert (await connection.answers(2))[1] == "200 OK|read 0."


INVALID = [
    b"\x00\x01\x02\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"NONE / HTTP/1.1\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    *(b"GET / HTTP/%b\r\n\r\n" % version for version in (b"2.0", b"0.9", b"1.2", b"x", b"1.1\nHost: x")),
    b"GET /\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\n\r\n",
    b"GET http://a HTTP/1.1\r\n\r\n",
    *(
        b"GET / HTTP/1.1\r\n%b\r\n\r\n" % line
        for line in (b"a: \x00", b"a: b\r c", b"a: b\r\n c: d", b"a : b", b": b", b"a")
    ),
    *(
        post("/", *headers)
        for headers in (
            ("content-length: 1", "content-length: 2"),
            ("content-length: 1", "transfer-encoding: chunked"),
            ("transfer-encoding: chunked", "content-length: 1"),
            ("transfer-encoding: chunked, gzip",),
            ("content-length: -1",),
            ("content-length: 99999999999999999999",),
        )
    ),
    *(CHUNKED + chunk for chunk in (b"fffffffffffffffff\r\n", b"-1\r\n", b"1\r\nab", b"1\nab\r\n", b"\r\n")),
]


@pytest.mark.parametrize("data", INVALID)
async def test_an_invalid_request_is_refused(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for num_before, packets in ((0, [data]), (0, cut(data, 1)), (1, [GET + data])):
        connection = Connection()
        connection.send(*packets)
        said = await connection.refusal(num_before)
        assert said.startswith("400 Bad Request|bad_request: the request is not valid: ")
        connection.protocol.connection_lost(None)
    assert not caplog.records


async def test_http_2_is_refused_by_name() -> None:
    connection = Connection()
    connection.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert (await connection.refusal()).endswith("HTTP/2.0 is not supported, use HTTP/1.1")


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_body_after_an_upgrade_offer_is_read(size: int) -> None:
    connection = Connection()
    offer = post("/", "connection: upgrade, x", "Upgrade: websocket", "content-length: 5") + b"abcde"
    connection.send(*cut(offer + offer, size))
    assert await connection.answers(2) == ["200 OK|read 5."] * 2


@pytest.mark.parametrize(
    "said", [b"", b"GE", GET, post("/", "content-length: 5"), GET + post("/", "content-length: 5")]
)
async def test_connections_that_wait_for_their_clients_are_few(said: bytes) -> None:
    Crowd.of(asyncio.get_running_loop()).max_idle = 2
    connections = []
    for packet in (post("/wait"), said, said, b""):
        connections.append(Connection())
        connections[-1].send(packet)
        await asyncio.sleep(0)
    assert [connection.wire.is_closed for connection in connections] == [False, True, False, False]
    for connection in connections:
        connection.protocol.connection_lost(None)


@pytest.mark.parametrize("said", [b"", b"GE", GET, post("/wait")])
async def test_the_memory_of_a_connection_does_not_wait_for_the_garbage_collector(said: bytes) -> None:
    connection = Connection()
    connection.send(said)
    await settle(lambda: said != GET or "200 OK" in connection.wire.text)
    gc.disable()
    try:
        connection.protocol.connection_lost(None)
        await settle(lambda: not connection.state.tasks)
        left = weakref.ref(connection.protocol)
        connection.protocol = None  # type: ignore[assignment]
        await asyncio.sleep(0.01)
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GE",
        GET,
        post("/", "content-length: 5"),
        post("/refused", "content-length: 5"),
        BIG,
        post("/wait") + GET,
        post("/wait") + b"\x00",
        post("/wait") + GET + post("/", "content-length: 5"),
    ],
)
async def test_nothing_is_left_of_a_client_that_vanished(said: bytes, error: Exception | None) -> None:
    connection = Connection()
    connection.protocol.timeout_keep_alive = 3600
    connection.protocol.head_s = connection.protocol.body_s = 3600.0
    connection.send(said)
    await asyncio.sleep(0.01)
    connection.protocol.connection_lost(error)
    await settle(lambda: not connection.state.tasks)
    left = weakref.ref(connection.protocol)
    connection.protocol = None  # type: ignore[assignment]
    gc.collect()
    assert left() is None
