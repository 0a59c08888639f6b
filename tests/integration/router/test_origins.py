"""Cross-origin use from a browser, if the deploy file allows it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.router_cluster import MODEL, RouterCluster, run_cluster

pytestmark = pytest.mark.integration

ORIGIN, OTHER = "https://chat.example", "https://other.example"
KEY = "key-of-anybody"
SAFE = {"cache-control", "content-length", "content-type"}
"""Headers that pages may always read."""
UNREAD = {"access-control-allow-origin", "access-control-expose-headers", "date", "server", "vary", "x-accel-buffering"}


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[RouterCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_API_KEYS", KEY)
        yield from run_cluster(folder, allowed_origins=(ORIGIN,))


@pytest.fixture(scope="module")
def anybodys(folder: Path) -> Iterator[RouterCluster]:
    yield from run_cluster(folder, allowed_origins=("*",))


def preflight(cluster: RouterCluster, path: str, origin: str = ORIGIN, method: str = "POST") -> httpx.Response:
    asked = {"access-control-request-method": method, "access-control-request-headers": "authorization, x-stainless-os"}
    return cluster.http.options(path, headers={"origin": origin} | asked)


def ask(cluster: RouterCluster, origin: str = ORIGIN, key: str = KEY, **body: object) -> httpx.Response:
    headers = {"origin": origin, "authorization": f"Bearer {key}"}
    return cluster.http.post("/v1/completions", headers=headers, json={"model": MODEL, "prompt": "x", **body})


@pytest.mark.parametrize(
    ("path", "method"), [("/v1/chat/completions", "POST"), ("/v1/models", "GET"), ("/tokenize", "POST")]
)
def test_preflights_need_no_key(guarded: RouterCluster, path: str, method: str) -> None:
    reply = preflight(guarded, path, method=method)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert method in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization, x-stainless-os"


def test_other_origins_are_refused(guarded: RouterCluster) -> None:
    reply = preflight(guarded, "/v1/chat/completions", OTHER)
    assert reply.status_code == 400
    assert "access-control-allow-origin" not in reply.headers
    assert "access-control-allow-origin" not in ask(guarded, OTHER).headers


@pytest.mark.parametrize("stream", [False, True])
def test_pages_can_read_all_response_headers(guarded: RouterCluster, stream: bool) -> None:
    reply = ask(guarded, trace=True, stream=stream)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "origin" in reply.headers["vary"].lower()
    shown = set(reply.headers["access-control-expose-headers"].split(", "))
    headers = set(reply.headers.keys()) - SAFE - UNREAD - {"transfer-encoding"}
    assert headers >= {"x-request-id", "x-baton-prefill", "x-baton-decode", "x-baton-trace", "server-timing"}
    assert headers <= shown
    assert "traceparent" in shown


def test_pages_read_errors(guarded: RouterCluster) -> None:
    refused = ask(guarded, key="wrong")
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    wrong = ask(guarded, n=0)
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, ORIGIN)
    nowhere = guarded.http.get("/nowhere", headers={"origin": ORIGIN})
    assert (nowhere.status_code, nowhere.headers["access-control-allow-origin"]) == (404, ORIGIN)
    assert "retry-after" in nowhere.headers["access-control-expose-headers"]


def test_all_origins(anybodys: RouterCluster) -> None:
    for origin in (ORIGIN, OTHER, "null"):
        assert preflight(anybodys, "/v1/completions", origin).headers["access-control-allow-origin"] == "*"
        assert ask(anybodys, origin).headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in ask(anybodys).headers


def test_none_by_default(shared: RouterCluster) -> None:
    assert preflight(shared, "/v1/chat/completions").status_code == 405
    reply = ask(shared)
    assert reply.status_code == 200
    assert [name for name in reply.headers if name.startswith("access-control")] == []
