"""The spans of requests, where somebody collects them, and their place in the client's own trace."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.launch.kinds import router_environ
from cluster.spec.errors import UserError
from router.tracing import Tracing, make_tracing
from tests.fakes.router_cluster import MODEL, RouterCluster, run_cluster

pytestmark = pytest.mark.integration

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(folder: Path, exporter: InMemorySpanExporter) -> Iterator[RouterCluster]:
    clusters = run_cluster(folder)
    with patch("router.server.make_tracing", lambda: Tracing(SimpleSpanProcessor(exporter))):
        cluster = next(clusters)
    yield cluster
    next(clusters, None)


def spans_after(cluster: RouterCluster, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    cluster.assert_empty()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    exporter.clear()
    return spans


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [("/v1/completions", "prompt"), ("/v1/responses", "input")])
def test_one_trace_from_client_to_decode(
    traced: RouterCluster, exporter: InMemorySpanExporter, path: str, prompt: str, stream: bool
) -> None:
    reply = traced.http.post(
        path, json={"model": MODEL, prompt: "abc", "stream": stream}, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}
    )
    spans = spans_after(traced, exporter)
    assert set(spans) == {"request", "queue", "decode queue", "bootstrap", "prefill", "transfer", "decode"}
    root = spans.pop("request")
    assert root.parent is not None
    assert root.context is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert reply.headers["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert root.attributes is not None
    assert root.attributes["gen_ai.request.model"] == MODEL
    for span in spans.values():
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == TRACE
        assert span.parent.span_id == root.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    told = {name: (span.attributes or {}).get("baton.replica") for name, span in spans.items()}
    assert told["bootstrap"] == told["prefill"] == "prefill-0"
    assert told["decode queue"] == told["transfer"] == told["decode"] == "decode-0"
    assert spans["prefill"].end_time - spans["prefill"].start_time == pytest.approx(40e6, abs=1e5)


def test_a_request_that_fails_says_why(traced: RouterCluster, exporter: InMemorySpanExporter) -> None:
    traced.decode.fails = "no memory"
    try:
        assert traced.post("/v1/completions", prompt="abc").status_code == 503
    finally:
        traced.decode.fails = None
    spans = spans_after(traced, exporter)
    assert set(spans) == {"request", "queue"}
    assert not spans["request"].status.is_ok
    assert "no memory" in (spans["request"].status.description or "")


def test_silent_where_nobody_collects(shared: RouterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = shared.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "x"},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
    )
    assert "traceparent" not in reply.headers
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert make_tracing() is None


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with patch.dict("sys.modules", {"opentelemetry.exporter": None}), pytest.raises(UserError, match=r"baton\[otel\]"):
        make_tracing()


def test_the_router_gets_the_variables_of_opentelemetry() -> None:
    environ = router_environ({"OTEL_SERVICE_NAME": "x", "HOME": "/"})
    assert environ["OTEL_SERVICE_NAME"] == "x"
    assert "HOME" not in environ
