"""Spans of requests, if a collector is configured, and their place in the client's trace."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.launch.kinds import router_environ
from cluster.spec.errors import UserError
from router.records import Tracing, make_tracing
from tests.fakes.otlp_collector import collecting
from tests.fakes.replica import PHASES
from tests.fakes.router_cluster import MODEL, RouterCluster, run_cluster

pytestmark = pytest.mark.integration

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LIBRARY = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


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
    assert set(spans) == {"request", *PHASES} - {"communication"}
    root = spans.pop("request")
    assert root.parent is not None
    assert root.context is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert reply.headers["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert root.attributes is not None
    assert root.attributes["gen_ai.request.model"] == MODEL
    took_ns: dict[str, int] = {}
    for name, span in spans.items():
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == TRACE
        assert span.parent.span_id == root.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        took_ns[name] = span.end_time - span.start_time
        assert took_ns[name] >= 0
    reported = {name: dict(span.attributes or {}) for name, span in spans.items()}
    assert reported["bootstrap"] == {"baton.replica": "prefill-0"}
    assert reported["prefill"] == {
        "baton.replica": "prefill-0",
        "baton.communication_s": pytest.approx(10e-6, abs=1e-6),
    }
    for name in ("decode-queue", "transfer", "delivery", "decode"):
        assert reported[name] == {"baton.replica": "decode-0"}
    assert took_ns["prefill"] == pytest.approx(30e3, abs=3e3)


def test_a_failed_request_has_its_reason_in_the_span(traced: RouterCluster, exporter: InMemorySpanExporter) -> None:
    traced.decode.fails = "no memory"
    try:
        assert traced.post("/v1/completions", prompt="abc").status_code == 503
    finally:
        traced.decode.fails = None
    spans = spans_after(traced, exporter)
    assert set(spans) == {"request", "preprocess", "queue"}
    assert not spans["request"].status.is_ok
    assert "no memory" in (spans["request"].status.description or "")


@pytest.mark.parametrize("compression", ["", "gzip"])
def test_a_collector_gets_them_over_http(folder: Path, monkeypatch: pytest.MonkeyPatch, compression: str) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-router")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        for cluster in run_cluster(folder):
            header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            cluster.http.post("/v1/completions", json={"model": MODEL, "prompt": "abc"}, headers=header)
            cluster.assert_empty()
    reported = [resource for request in collector.requests for resource in request.resource_spans]
    services = {
        fact.value.string_value for each in reported for fact in each.resource.attributes if fact.key == "service.name"
    }
    spans = [span for resource in reported for scope in resource.scope_spans for span in scope.spans]
    assert services == {"my-router"}
    assert {span.name for span in spans} == {"request", *PHASES} - {"communication"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    (root,) = [span for span in spans if span.name == "request"]
    assert root.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in spans if span is not root} == {root.span_id}


def test_no_spans_without_a_collector(shared: RouterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with patch.dict("sys.modules", {LIBRARY: None}), pytest.raises(UserError, match=r"pip install -e \'\.\[otel\]\'"):
        make_tracing()


def test_the_router_gets_the_variables_of_opentelemetry() -> None:
    environ = router_environ({"OTEL_SERVICE_NAME": "x", "HOME": "/"})
    assert environ["OTEL_SERVICE_NAME"] == "x"
    assert "HOME" not in environ


def test_an_unresponsive_collector_does_not_delay_shutdown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector accepts connections and never answers. The exporter alone would wait for it and retry."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "4")
        clusters = run_cluster(folder)
        cluster = next(clusters)
        assert cluster.http.post("/v1/completions", json={"model": MODEL, "prompt": "abc"}).status_code == 200
        cluster.assert_empty()
        next(clusters, None)
    assert "the collector did not accept them within 2 s" in caplog.text
    for thread in threading.enumerate():
        if thread.name == "OtelBatchSpanRecordProcessor":  # it gives up by itself, but must not do so in another test
            thread.join(20)
