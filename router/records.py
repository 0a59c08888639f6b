"""Records of finished requests in the access log and as OpenTelemetry spans.

Spans are exported if the environment names a collector (OTEL_EXPORTER_OTLP_ENDPOINT); the OpenTelemetry library is
optional. Replicas export no spans: they report the times of their phases, from which the router makes spans.
"""

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from cluster.logs import with_facts
from cluster.spec.errors import UserError
from router.answer import Answer, Summary
from router.phases import totals_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Maximum time to export the last spans when the router stops."""
TRACEPARENT = "traceparent"
"""Header of https://www.w3.org/TR/trace-context."""


def log_request(
    answer: Answer,
    summary: Summary,
    *,
    caller: str | None,
    traceparent: str,
    error: BaseException | None,
) -> None:
    """Write a finished request with the ``summary`` of its answer to the access log.

    ``traceparent`` is empty if the request has no trace.
    """
    choices = answer.choice_ids
    _log.info(
        "request %s",
        summary.outcome,
        extra=with_facts(
            request_id=summary.id,
            key=caller,
            choice=choices[0] if len(choices) == 1 else None,
            choices=choices if len(choices) > 1 else None,
            prefill=answer.prefills or None,
            decode=answer.decodes or None,
            trace_id=trace_id(traceparent),
            prompt_tokens=answer.num_prompt_tokens,
            tokens=answer.num_tokens,
            total_ms=round(summary.seconds * 1000, 3),
            phases_ms={name: round(seconds * 1000, 3) for name, seconds in totals_of(summary.phases).items()},
            error=str(error) or type(error).__name__ if error is not None else None,
        ),
    )


def trace_id(traceparent: str) -> str | None:
    """Return the trace id in a ``traceparent`` header, or None if it is invalid."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None


class Tracing:
    """Recorder of requests as spans, which it passes to a processor."""

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
        """Start a request's span, as a child of its client's span if there is one."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract({TRACEPARENT: traceparent})
        return self._tracer.start_span("request", parent, SpanKind.SERVER, start_time=_unix_ns(arrived_s))

    def header(self, span: "Span") -> dict[str, str]:
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier

    def end(self, span: "Span", answer: Answer, model: str, error: BaseException | None) -> None:
        """End a request's span, with a child span for each phase."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        now_s = time.monotonic()
        context = set_span_in_context(span)
        for phase in answer.phases_until(now_s):
            attributes: dict[str, str | float] = {"baton.replica": phase.replica} if phase.replica else {}
            if phase.communication_s:
                attributes["baton.communication_s"] = phase.communication_s
            child = self._tracer.start_span(
                phase.name, context, attributes=attributes, start_time=_unix_ns(phase.start_s)
            )
            child.end(_unix_ns(phase.end_s))
        span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": answer.num_prompt_tokens,
                "gen_ai.usage.output_tokens": answer.num_tokens,
            }
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, str(error) or type(error).__name__))
        span.end(_unix_ns(now_s))

    def close(self) -> None:
        """Export the remaining spans, if the collector accepts them in time."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            _log.warning("the last spans were dropped: the collector did not accept them within %g s", CLOSE_S)


def make_tracing() -> Tracing | None:
    """Return an exporter to the collector that the environment names; None if it names none."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(f"{_ENDPOINTS[0]} is set, but {error.name} is missing: pip install -e '.[otel]'") from error
    return Tracing(BatchSpanProcessor(OTLPSpanExporter()))


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
