"""Where requests go, seen from outside: the response names the replica."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.bootstrap import FakeTable, entry_of, table_of
from tests.fakes.replica import FakeReplica
from tests.fakes.router_cluster import MODEL, make_server, wait_ready

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    """A router with two prefill and two decode replicas."""
    table = FakeTable()
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    replicas = [FakeReplica(name) for name in names]
    with replicas[0], replicas[1], replicas[2], replicas[3]:
        server = make_server(folder, table, prefill_policy="session", decode_policy="follow_room")
        table.show(table_of(*(entry_of(replica.peer) for replica in replicas)))
        with httpx.Client(base_url=server.start(), timeout=60, trust_env=False) as client:
            wait_ready(client)
            yield client
        server.stop()


def homes(http: httpx.Client, count: int, session: str = "", **body: object) -> Counter[str]:
    headers = {"x-session-id": session} if session else {}
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 1, **body}
    replies = [http.post("/v1/completions", json=asked, headers=headers) for _ in range(count)]
    return Counter(reply.headers["x-baton-prefill"] for reply in replies)


def test_a_session_stays_on_one_replica(http: httpx.Client) -> None:
    by_header = {name: homes(http, 4, session=name) for name in map(str, range(8))}
    assert all(len(counts) == 1 for counts in by_header.values())
    assert len(set().union(*by_header.values())) == 2
    for field in ("prompt_cache_key", "user"):
        assert homes(http, 4, **{field: "3"}) == by_header["3"]
        assert homes(http, 2, session="3", **{field: "4"}) == homes(http, 2, session="3")


def test_without_a_session_load_decides(http: httpx.Client) -> None:
    assert homes(http, 4) == {"prefill-0": 2, "prefill-1": 2}


def test_follow_room_uses_every_replica(http: httpx.Client) -> None:
    replies = [
        http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1, "timeline": True})
        for _ in range(12)
    ]
    for reply in replies:
        room = int(reply.headers["x-baton-timeline"].rsplit("/", 1)[1])
        assert reply.headers["x-baton-decode"] == f"decode-{room % 2}"
