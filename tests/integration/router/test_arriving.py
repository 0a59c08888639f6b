"""Slow request bodies: each has a time limit, and all together a memory limit."""

import json
import select
from http.client import HTTPConnection
from pathlib import Path

import pytest

from router.connection import RouterProtocol
from router.preprocess import model
from tests.fakes.router_cluster import CONTEXT, MODEL, RouterCluster, run_cluster

pytestmark = pytest.mark.integration

WAIT_S = 60.0


def begin(cluster: RouterCluster, num_bytes: int, sent: bytes) -> HTTPConnection:
    """Send the beginning of a request body."""
    url = cluster.http.base_url
    connection = HTTPConnection(url.host, url.port, timeout=WAIT_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", str(num_bytes))
    connection.endheaders(sent)
    return connection


def answer(connection: HTTPConnection) -> tuple[int, str, str | None]:
    """Return status, body, and the Retry-After header."""
    reply = connection.getresponse()
    found = reply.status, reply.read().decode(), reply.headers["retry-after"]
    connection.close()
    return found


def test_an_incomplete_body_times_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterProtocol, "body_s", 0.5)
    for cluster in run_cluster(folder):
        status, said, _ = answer(begin(cluster, 100, b'{"prompt": '))
        assert status == 408
        assert "the request body did not arrive within 0.5 s" in said


def test_a_body_can_arrive_in_parts(folder: Path) -> None:
    for cluster in run_cluster(folder):
        connection = begin(cluster, 30, b'{"prompt": ')
        connection.send(b'"abc"' + b" " * 13 + b"}")
        assert answer(connection)[1].startswith('{"error":{"message":"model: field required')


@pytest.mark.parametrize("offer", ["h2c", " TLS/1.0, h2c\t"])
def test_a_body_after_an_http_2_upgrade_offer_is_accepted(cluster: RouterCluster, offer: str) -> None:
    """Java's client offers this upgrade at addresses without TLS. The answer is HTTP/1.1 every time."""
    url = cluster.http.base_url
    connection = HTTPConnection(url.host, url.port, timeout=WAIT_S)
    headers = {"connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAMAAABkAAQAAP__", "Upgrade": offer}
    for text in ("abc", "Upgrade: h2c"):
        connection.request("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": text}), headers)
        reply = connection.getresponse()
        assert (reply.status, json.load(reply)["usage"]["prompt_tokens"]) == (200, len(text) + 1)
    connection.close()


def test_bodies_that_arrive_at_the_same_time_have_bounded_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 20
    monkeypatch.setattr(model, "MIN_BODY_BYTES", most - 16 * CONTEXT)
    for cluster in run_cluster(folder):
        open_ones = [begin(cluster, most, b"x" * (most - 1)) for _ in range(5)]
        (ready,), _, _ = select.select([one.sock for one in open_ones], [], [], WAIT_S)
        refused = next(one for one in open_ones if one.sock is ready)
        open_ones.remove(refused)
        status, said, retry_after = answer(refused)
        assert (status, retry_after) == (503, "1")
        assert f"bytes; allowed: {4 * most} now; try again" in said
        for connection in open_ones:
            connection.send(b"x")
            assert answer(connection)[0] == 400
        assert cluster.post("/v1/completions", prompt="abcd").status_code == 200
        left = [begin(cluster, most, b"x" * (most - 1)) for _ in range(4)]
        assert select.select([one.sock for one in left], [], [], 0.2)[0] == []
        for connection in left:
            connection.close()
