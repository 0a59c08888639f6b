"""Followers of the rank table over real sockets: absence of the service, failures and answers that are no table."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from cluster.bootstrap.client import BootstrapClient, follow_table, follow_table_async
from cluster.bootstrap.service import BootstrapServer
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.registry import TableSnapshot

pytestmark = pytest.mark.integration

TOKEN = "token-of-the-test"
LEASE_S = 1.0
WAIT_S = 60.0


async def test_follow_table_async_waits_through_the_absence_of_the_service() -> None:
    server = BootstrapServer("127.0.0.1", 0, TOKEN, LEASE_S)
    url = server.start()
    tables = follow_table_async(url, TOKEN)
    first = await anext(tables)
    assert first is not None
    await asyncio.to_thread(server.stop)
    again = BootstrapServer("127.0.0.1", int(url.rsplit(":", 1)[1]), TOKEN, LEASE_S)
    following = asyncio.ensure_future(anext(tables))
    await asyncio.sleep(0.1)
    again.start()
    second = await asyncio.wait_for(following, WAIT_S)
    assert second is not None
    assert second.version > first.version
    await tables.aclose()
    await asyncio.to_thread(again.stop)


async def test_follow_table_async_tells_that_nothing_changes() -> None:
    server = BootstrapServer("127.0.0.1", 0, TOKEN, LEASE_S)
    tables = follow_table_async(server.start(), TOKEN, lambda: 0.01)
    first, second = await anext(tables), await asyncio.wait_for(anext(tables), WAIT_S)
    assert (first is None, second) == (False, None)
    await tables.aclose()
    await asyncio.to_thread(server.stop)


class _Ailing(BaseHTTPRequestHandler):
    """Handler with given answers."""

    answers: ClassVar[list[tuple[int, bytes]]]
    versions: ClassVar[list[int]]
    """Versions that the watcher has named."""

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        self.versions.append(int(query["version"][0]))
        status, body = self.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


TABLE = (200, msgspec.json.encode(TableSnapshot(version=7, replicas=(), reaped={})))
FAILURES = [(503, b"busy"), (200, b"[]"), (401, b'{"error": {"code": "unauthorized", "message": "wrong token"}}')]


@contextmanager
def ailing_service(answers: Sequence[tuple[int, bytes]] = (*FAILURES, TABLE)) -> Iterator[str]:
    """Yield a service with given answers; by default it fails and returns nonsense before it works."""
    _Ailing.answers, _Ailing.versions = list(answers), []
    with HTTPServer(("127.0.0.1", 0), _Ailing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def test_follow_table_async_continues_after_invalid_tables() -> None:
    with ailing_service() as url:
        tables = follow_table_async(url, TOKEN)
        table = await asyncio.wait_for(anext(tables), WAIT_S)
        assert table is not None
        assert table.version == 7
        await tables.aclose()


def test_an_answer_that_is_no_table_is_an_error() -> None:
    with (
        ailing_service([(200, b"hello")]) as url,
        closing(BootstrapClient(url, TOKEN)) as client,
        pytest.raises(PeerUnreachableError, match="the response is not a table"),
    ):
        client.table()


def test_invalid_tables_count_as_a_lost_service() -> None:
    lost: list[int] = []
    with ailing_service() as url:
        client = BootstrapClient(url, TOKEN)
        tables = follow_table(client.watch, lambda: WAIT_S, lambda: lost.append(1))
        seen = [next(tables) for _ in range(4)]
        client.close()
    assert [snapshot and snapshot.version for snapshot in seen] == [None, None, None, 7]
    assert len(lost) == 3


async def test_followers_ask_for_the_whole_table_after_an_error() -> None:
    answers = [TABLE, (503, b"busy"), TABLE]
    with ailing_service(answers) as url:
        tables = follow_table_async(url, TOKEN)
        seen = [await asyncio.wait_for(anext(tables), WAIT_S) for _ in range(2)]
        assert [snapshot and snapshot.version for snapshot in seen] == [7, 7]
        await tables.aclose()
    assert _Ailing.versions == [-1, 7, -1]
    with ailing_service(answers) as url, closing(BootstrapClient(url, TOKEN)) as client:
        following = follow_table(client.watch, lambda: WAIT_S)
        seen = [await asyncio.to_thread(next, following) for _ in range(3)]
        assert [snapshot and snapshot.version for snapshot in seen] == [7, None, 7]
    assert _Ailing.versions == [-1, 7, -1]
