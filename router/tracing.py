"""OpenTelemetry spans of every request, where the environment (OTEL_EXPORTER_OTLP_ENDPOINT) says who collects them.

The library is optional. Replicas send no spans: they report the times of their phases, and the router writes them down.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cluster.spec.errors import UserError
from router.answer import Answer
from router.finished import TRACEPARENT, Phase, phases_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait for a collector when the router ends."""


class Tracing:
    """Makes the spans of requests and hands them to a processor."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "baton")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton.router")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, traceparent: str, arrived_s: float) -> "Span":
        """Start the span of a request, below that of its client where it names one."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract({TRACEPARENT: traceparent})
        return self._tracer.start_span("request", parent, SpanKind.SERVER, start_time=_unix_ns(arrived_s))

    def header(self, span: "Span") -> dict[str, str]:
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier

    def end(self, span: "Span", answer: Answer, facts: Mapping[str, Any], error: BaseException | None) -> None:
        """End the span of a request, with a span for each phase."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        now_s = time.monotonic()
        context = set_span_in_context(span)
        for phase in [*phases_of(answer, now_s), *_decode_queue(answer)]:
            attributes = {"baton.replica": phase.replica} if phase.replica else {}
            child = self._tracer.start_span(
                phase.name, context, attributes=attributes, start_time=_unix_ns(phase.start_s)
            )
            child.end(_unix_ns(phase.end_s))
        span.set_attributes(dict(facts))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, str(error) or type(error).__name__))
        span.end(_unix_ns(now_s))

    def close(self) -> None:
        """Export the remaining spans, as far as the collector takes them in time."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            _log.warning("the last spans were dropped: the collector did not take them within %g s", CLOSE_S)


def make_tracing() -> Tracing | None:
    """Make spans for the endpoint that the environment names; None where it names none."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(f"{_ENDPOINTS[0]} is set, but {error.name} is missing: pip install 'baton[otel]'") from error
    return Tracing(BatchSpanProcessor(OTLPSpanExporter()))


def _decode_queue(answer: Answer) -> Iterator[Phase]:
    """Yield the wait for pages, which overlaps other phases."""
    if (phases := answer.phases) is not None:
        end_s = answer.opened_s + phases.decode_queue_s
        yield Phase("decode queue", answer.opened_s, end_s, phases.decode)


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
