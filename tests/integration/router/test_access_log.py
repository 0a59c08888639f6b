"""Access log: a record for every request if enabled, never with a prompt, an answer or a key."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.logs import JsonLines
from cluster.spec.config import LogConfig
from cluster.spec.env import API_KEYS
from router.records import trace_id
from tests.fakes.replica import PHASES
from tests.fakes.router_cluster import RouterCluster, run_cluster

pytestmark = pytest.mark.integration

KEY = "key-of-somebody"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def logged(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[RouterCluster]:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(API_KEYS.name, KEY)
    for cluster in run_cluster(folder, log=LogConfig(requests=True)):
        trace = {"x-request-id": "request-7", "traceparent": f"00-{TRACE}-{1:016x}-01"}
        cluster.http.headers.update({"authorization": f"Bearer {KEY}"} | trace)
        yield cluster


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_record_has_the_facts_of_a_request(
    logged: RouterCluster, caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    body = {"prompt": "very secret"} if path == "/v1/completions" else {"input": "very secret"}
    reply = logged.post(path, stream=stream, **body)
    assert reply.status_code == 200
    (record,) = [record for record in caplog.records if record.name == "router.records"]
    text = JsonLines("router").format(record)
    line = json.loads(text)
    assert (line["message"], line["request_id"], line["trace_id"]) == ("request finished", "request-7", TRACE)
    assert (line["prefill"], line["decode"], line["key"]) == ("prefill-0", "decode-0", "key-0")
    assert line["choice"] > 0
    assert line["tokens"] > 0
    assert line["prompt_tokens"] >= len("very secret")
    assert [*line["phases_ms"]] == PHASES
    assert line["total_ms"] > 0
    assert "error" not in line
    assert "secret" not in text
    assert KEY not in text


def test_a_failure_is_logged_with_its_reason(logged: RouterCluster, caplog: pytest.LogCaptureFixture) -> None:
    logged.decode.fails = "no memory"
    assert logged.post("/v1/completions", prompt="very secret").status_code == 503
    lines = [*map(json.loads, map(JsonLines("router").format, caplog.get_records("setup") + caplog.records))]
    joined = [line["replica"] for line in lines if line["message"] == "a replica joined"]
    assert joined == ["prefill-0", "decode-0"]
    last = next(line for line in lines if line["logger"] == "router.records")
    assert last["message"] == "request failed"
    assert "no memory" in last["error"]
    failed, *_ = [line for line in lines if line["message"].startswith("a replica failed an attempt")]
    assert (failed["room"], failed["replica"], failed["level"]) == (last["choice"], "decode-0", "warning")
    assert "secret" not in caplog.text


def test_a_stream_that_fails_in_the_middle_has_failed(logged: RouterCluster, caplog: pytest.LogCaptureFixture) -> None:
    logged.decode.fails_after, logged.decode.token_s = 5, 0.05
    reply = logged.post("/v1/completions", prompt="very secret", max_tokens=50, stream=True)
    assert (reply.status_code, "out of memory" in reply.text) == (200, True)
    (record,) = [record for record in caplog.records if record.name == "router.records"]
    line = json.loads(JsonLines("router").format(record))
    assert (line["message"], line["error"]) == ("request failed", "decode-0: out of memory")
    assert logged.http.get("/status").json()["recent"][0]["outcome"] == "failed"


@pytest.mark.parametrize(
    ("traceparent", "found"), [("", None), (f"00-{TRACE}-0000000000000001-01", TRACE), ("00-short-1-01", None)]
)
def test_the_trace_of_a_header(traceparent: str, found: str | None) -> None:
    assert trace_id(traceparent) == found
