"""OpenTelemetry collector that records OTLP over HTTP."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    """Collector on a free port of this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        """Return the value for ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        is_known = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
        if is_known:
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()
