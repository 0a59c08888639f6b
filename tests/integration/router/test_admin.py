"""Administrative routes and clients' API keys."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.spec.errors import UserError
from cluster.spec.kv import page_keys
from cluster.spec.messages import Drain, Resume
from cluster.spec.tiers import FlushCache, PinPages, UseStorage
from router import connection
from router.preprocess import model
from tests.fakes.bootstrap import FakeTable
from tests.fakes.router_cluster import MODEL, RouterCluster, make_server, run_cluster

pytestmark = pytest.mark.integration

ADMIN = {"authorization": "Bearer the-admin-key"}
KEYS = """
- {name: busy, key: key-of-busy, max_requests: 1, priority: 3, weight: 2.5, cache: shared}
- {name: thrifty, key: key-of-thrifty, tokens_per_minute: 5, cache: shared}
"""


@pytest.fixture
def guarded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouterCluster]:
    monkeypatch.setenv("BATON_ADMIN_KEY", "the-admin-key")
    monkeypatch.setenv("BATON_API_KEYS", "key-of-anybody, key-of-another")
    (tmp_path / "keys.yaml").write_text(KEYS)
    monkeypatch.setattr(connection, "WAITING_S", 0.05)
    yield from run_cluster(folder, api_keys_file=str(tmp_path / "keys.yaml"))


def ask(cluster: RouterCluster, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    fields = {"model": MODEL, "prompt": "abc", "max_tokens": 2, **body}
    return cluster.http.post(path, json=fields, headers={"authorization": f"Bearer {key}"})


def admin(cluster: RouterCluster, path: str, **body: Any) -> Any:
    reply = cluster.http.post(f"/admin/{path}", json=body, headers=ADMIN)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_without_a_key_the_administrators_routes_are_closed(shared: RouterCluster) -> None:
    reply = shared.http.post("/admin/drain", json={}, headers=ADMIN)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "no_admin_key")


def test_the_administrators_key_is_its_own(guarded: RouterCluster) -> None:
    for headers in ({}, {"authorization": "Bearer key-of-anybody"}, {"authorization": "the-admin-key"}):
        assert guarded.http.get("/admin/load", headers=headers).status_code == 401
    assert ask(guarded, "the-admin-key").status_code == 401


def test_restricted_routes_require_a_key(guarded: RouterCluster) -> None:
    paths = guarded.http.get("/openapi.json").json()["paths"]
    asked = {path: guarded.http.request(method, path) for path, methods in paths.items() for method in methods}
    refused = {path for path, reply in asked.items() if reply.status_code == 401}
    assert set(paths) - refused == {"/", "/health", "/ping", "/ready", "/load", "/version", "/metrics"}
    assert {"/admin/drain", "/v1/completions", "/traces/{number}"} & set(paths) <= refused


def test_replicas_receive_commands(guarded: RouterCluster) -> None:
    assert admin(guarded, "drain", replica="decode-0") == {"draining": "decode-0"}
    assert guarded.decode.wait_message(Drain)
    assert admin(guarded, "resume", replica="decode-0") == {"resumed": "decode-0"}
    assert guarded.decode.wait_message(Resume)
    assert admin(guarded, "flush_cache", replica="prefill-0") == {"flushing": ["prefill-0"]}
    assert guarded.prefill.wait_message(FlushCache)
    assert sorted(admin(guarded, "flush_cache")["flushing"]) == ["decode-0", "prefill-0"]
    assert guarded.decode.wait_message(FlushCache)
    assert admin(guarded, "detach_storage", replica="decode-0") == {"detaching": ["decode-0"]}
    assert guarded.decode.wait_message(UseStorage) == [UseStorage(is_attached=False)]
    assert len(admin(guarded, "attach_storage")["attaching"]) == 2
    unknown = guarded.http.post("/admin/drain", json={"replica": "decode-7"}, headers=ADMIN)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "replica")
    assert "allowed: " in unknown.json()["error"]["message"]


def test_a_prompt_is_pinned_as_requests_name_it(guarded: RouterCluster) -> None:
    prompt = list(range(3, 200))
    guarded.prefill.num_pinned = 2
    answer = admin(guarded, "pin", prompt=prompt)
    pinned = {"prefill-0": 2, "decode-0": 0}
    assert answer == {"prompt_pages": 3, "pinned_pages": pinned, "replicas": ["prefill-0", "decode-0"]}
    salts = {"cache_salt": "ours", "extra_key": "more"}
    mine = {"replica": "prefill-0", "api_key": "key-0", **salts}
    salt = f"{sha256(b'key-of-anybody').hexdigest()}\0ours\0more"
    assert admin(guarded, "unpin", prompt=prompt, **mine)["pinned_pages"] == {"prefill-0": 2}
    assert guarded.prefill.wait_message(PinPages) == [
        PinPages(keys=page_keys(prompt, 64, "\0"), is_pinned=True),
        PinPages(keys=page_keys(prompt, 64, salt), is_pinned=False),
    ]
    assert ask(guarded, "key-of-anybody", prompt=prompt, **salts).status_code == 200
    assert guarded.last_submit().cache_salt == salt


def test_keys_share_cached_prompts_only_if_both_ask_for_it(guarded: RouterCluster) -> None:
    salts = {}
    for key in ("key-of-anybody", "key-of-another", "key-of-busy", "key-of-thrifty"):
        assert ask(guarded, key).status_code == 200
        salts[key] = guarded.last_submit().cache_salt
    assert salts["key-of-anybody"] != salts["key-of-another"]
    assert salts["key-of-busy"] == salts["key-of-thrifty"] == "\0"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("detach_storage", {"replca": "prefill-0"}, "replca: there is no such field"),
        ("flush_cache", {"tiers": ["storage"]}, "tiers: there is no such field"),
        ("pin", {"prompt": [5] * 64, "foo": 1}, "foo: there is no such field"),
        ("pin", {"prompt": [5] * 64, "api_key": "nobody"}, "api_key: there is no key 'nobody'; allowed: busy, thrifty"),
        ("pin", {"prompt": ["a", "b"]}, "prompt: must be a string, or a list of token ids; neither may be empty"),
        ("pin", {"prompt": []}, "prompt: must be a string, or a list of token ids; neither may be empty"),
        ("unpin", {"prompt": [5] * 63}, "prompt: got 63 tokens, less than a page; allowed: at least 64 (kv.page_size)"),
    ],
)
def test_invalid_commands_are_refused_and_not_forwarded(
    guarded: RouterCluster, path: str, body: dict[str, object], words: str
) -> None:
    reply = guarded.http.post(f"/admin/{path}", json=body, headers=ADMIN)
    assert (reply.status_code, reply.json()["error"]["message"][: len(words)]) == (400, words)
    assert not [
        reported for reported in guarded.prefill.received if isinstance(reported, PinPages | UseStorage | FlushCache)
    ]


@pytest.mark.parametrize("path", ["pin", "detach_storage"])
def test_a_refusal_by_a_replica_is_an_error(guarded: RouterCluster, path: str) -> None:
    guarded.decode.refusal = "nothing is configured"
    body = {"prompt": [5] * 64} if path.endswith("pin") else {}
    reply = guarded.http.post(f"/admin/{path}", json=body, headers=ADMIN)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "refused")
    assert reply.json()["error"]["message"] == "decode-0: nothing is configured; done by prefill-0"


def test_the_router_drains_and_resumes(guarded: RouterCluster) -> None:
    admin(guarded, "drain")
    assert guarded.http.get("/ready").status_code == 503
    assert ask(guarded, "key-of-anybody").status_code == 503
    assert guarded.http.get("/admin/load", headers=ADMIN).json()["router"]["draining"]
    admin(guarded, "resume")
    assert ask(guarded, "key-of-anybody").status_code == 200


def test_load_counts_open_requests(guarded: RouterCluster) -> None:
    guarded.decode.flow.clear()
    with guarded.http.stream(
        "POST",
        "/v1/completions",
        json={"model": MODEL, "prompt": "abc", "max_tokens": 5, "stream": True},
        headers={"authorization": "Bearer key-of-anybody"},
    ):
        load = guarded.http.get("/admin/load", headers=ADMIN).json()
        guarded.decode.flow.set()
    assert load["router"] == {"name": "router", "open": 1, "waiting": 0, "draining": False}
    assert load["replicas"]["prefill-0"]["open"] == {"num_requests": 1, "num_tokens": 4}
    assert load["replicas"]["decode-0"]["open"] == {"num_requests": 1, "num_tokens": 9}


def test_only_known_keys_may_ask(guarded: RouterCluster) -> None:
    for key in ("key-of-anybody", "key-of-another", "key-of-busy"):
        assert ask(guarded, key).status_code == 200
    refused = ask(guarded, "key-of-nobody")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "key-of-nobody" not in refused.text


def test_a_key_has_a_limit_of_open_requests(guarded: RouterCluster) -> None:
    guarded.decode.flow.clear()
    headers = {"authorization": "Bearer key-of-busy"}
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 2, "stream": True}
    with guarded.http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        guarded.decode.wait_submits(1)
        refused = ask(guarded, "key-of-busy")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["message"] == "busy: 1 requests are open; allowed: 1 requests at once"
        assert guarded.metric('baton_admission_rejections_total{reason="max_requests"}') == 1
        guarded.decode.flow.set()
        assert ask(guarded, "key-of-anybody").status_code == 200
        assert "[DONE]" in reply.read().decode()
    guarded.assert_empty()
    assert ask(guarded, "key-of-busy").status_code == 200


def test_replicas_learn_the_tenant_and_its_weight(guarded: RouterCluster) -> None:
    seen = set()
    for key in ("key-of-busy", "key-of-anybody"):
        assert ask(guarded, key).status_code == 200
        seen.add((guarded.last_submit().tenant, guarded.last_submit().weight))
    assert seen == {("busy", 2.5), ("key-0", 1.0)}


def test_a_key_has_its_priority_and_may_only_ask_for_later(guarded: RouterCluster) -> None:
    for asked, given in ((None, 3), (-5, 3), (9, 9)):
        assert ask(guarded, "key-of-busy", priority=asked).status_code == 200
        assert guarded.last_submit().priority == given


def test_a_key_has_a_limit_of_tokens_per_minute(guarded: RouterCluster) -> None:
    assert ask(guarded, "key-of-thrifty", max_tokens=300).status_code == 200
    refused = ask(guarded, "key-of-thrifty")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 1000


def test_keys_that_cannot_be_read_stop_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"router\.api_keys_file: .*cannot be read"):
        make_server(folder, FakeTable(), api_keys_file=str(tmp_path / "none"))


def test_limits_of_a_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MIN_BODY_BYTES", 1 << 20)
    for cluster in run_cluster(folder):
        assert cluster.post("/v1/completions", prompt="x" * 2**21).status_code == 413
        assert cluster.post("/v1/completions", prompt="abcd", n=2).status_code == 200
