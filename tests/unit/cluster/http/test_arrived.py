"""Memory of requests that no application has taken yet: what is counted, who is disconnected, and what is freed."""

import asyncio
from typing import Any, cast

import pytest

from cluster.http.crowd import MAX_ARRIVED_BYTES, MAX_TURNS, Crowd
from cluster.http.holdings import Holdings
from tests.fakes.http_connection import Connection, Protocol, post, settle

LIMIT = 1 << 20
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def leave(connection: Connection) -> None:
    connection.protocol.connection_lost(None)
    await settle(lambda: not connection.state.tasks)


LARGE = post("/", f"a: {'x' * 60_000}", "content-length: 3")


async def test_complete_heads_without_bodies_take_a_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "body_s", 60.0)
    connections = list[Connection]()
    for _ in range(MAX_ARRIVED_BYTES // 60_000 + 100):
        connections.append(Connection())
        connections[-1].send(LARGE)
        await asyncio.sleep(0)
    is_aborted = [connection.wire.is_closed for connection in connections]
    assert sum(is_aborted) >= 100
    assert is_aborted == sorted(is_aborted, reverse=True)
    assert Crowd.of(asyncio.get_running_loop()).arrived.total <= MAX_ARRIVED_BYTES
    for connection in connections:
        connection.protocol.connection_lost(None)
    await settle(lambda: not any(connection.state.tasks for connection in connections))


async def test_incomplete_heads_end_no_request_whose_body_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads are shorter than what has arrived of the body."""
    monkeypatch.setattr(Protocol, "body_s", 60.0)
    monkeypatch.setattr(Protocol, "head_s", 60.0)
    victim, crowd = Connection(), Crowd.of(asyncio.get_running_loop())
    crowd.heads = Holdings(LIMIT)
    victim.send(post("/wait", "content-length: 60000") + b"x" * 50_000)
    others = [Connection() for _ in range(LIMIT // 10_000 + 10)]
    for other in others:
        other.send(b"GET / HTTP/1.1\r\na: " + b"x" * 10_000)
    assert sum(other.wire.is_closed for other in others) >= 10
    assert not victim.wire.is_closed
    assert crowd.heads.total <= LIMIT
    for connection in (victim, *others):
        await leave(connection)
    await settle(lambda: crowd.heads.total == crowd.arrived.total == 0)


async def test_requests_of_one_key_end_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "body_s", 60.0)
    monkeypatch.setattr(Protocol, "client_of", lambda _, scope: dict(scope.get("headers", ())).get(b"key"))
    Crowd.of(asyncio.get_running_loop()).arrived = Holdings(LIMIT)
    victim = Connection()
    victim.send(post("/", "key: alice", f"a: {'x' * 62_000}", "content-length: 3"))
    others = [Connection() for _ in range(LIMIT // 60_000 + 10)]
    for other in others:
        other.send(post("/", "key: mallory", f"a: {'x' * 60_000}", "content-length: 3"))
        await asyncio.sleep(0)
    assert sum(other.wire.is_closed for other in others) >= 10
    assert not victim.wire.is_closed
    for connection in (victim, *others):
        await leave(connection)


async def test_what_an_application_has_taken_is_not_counted() -> None:
    arrived, connection = Crowd.of(asyncio.get_running_loop()).arrived, Connection()
    connection.send(LARGE + b"ab")
    assert arrived.total > 60_000
    await settle(lambda: arrived.total > 0)
    connection.send(b"c")
    assert (await connection.answers())[0].endswith("|read 3.")
    assert arrived.total == 0


async def test_requests_that_wait_are_counted_with_their_overhead() -> None:
    arrived, connection = Crowd.of(asyncio.get_running_loop()).arrived, Connection()
    connection.send(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n" + GET * 7)
    assert 8 << 12 <= arrived.total <= 8 << 13
    await leave(connection)


@pytest.mark.parametrize("is_started", [False, True])
async def test_the_memory_of_an_aborted_request_is_free_before_its_turn_to_end(is_started: bool) -> None:
    connection = Connection()
    connection.send(LARGE + b"ab")
    if is_started:
        await asyncio.sleep(0)
    scope, cycle = cast(Any, connection.protocol.scope), connection.protocol.cycle
    for _ in range(MAX_TURNS):
        connection.protocol._crowd.take_turn(lambda: None, lambda: "another client")
    connection.protocol.connection_lost(None)
    assert (scope["headers"], len(cast(Any, cycle).body)) == ([], 0)
    await settle(lambda: not connection.state.tasks)
