"""One record for every request that has ended: who asked, where it ran, how long each phase took."""

import logging
from dataclasses import dataclass

from cluster.logs import with_facts
from router.answer import Answer
from router.phases import phases_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is known of a request before it runs."""

    request_id: str
    caller: str | None
    """Name of its API key."""
    traceparent: str
    """The trace it is in, as its client or the router's own span says; empty for none."""
    num_prompt_tokens: int
    arrived_s: float


def log_request(asked: Asked, answer: Answer, outcome: str, error: BaseException | None, now_s: float) -> None:
    """A request is over."""
    milliseconds = {phase.name: round((phase.end_s - phase.start_s) * 1000, 3) for phase in phases_of(answer, now_s)}
    _log.info(
        "request %s",
        outcome,
        extra=with_facts(
            request_id=asked.request_id,
            key=asked.caller,
            room=answer.rooms[0] if len(answer.rooms) == 1 else None,
            rooms=answer.rooms if len(answer.rooms) > 1 else None,
            prefill=answer.headers["x-baton-prefill"] or None,
            decode=answer.headers["x-baton-decode"] or None,
            trace_id=trace_id(asked.traceparent),
            prompt_tokens=asked.num_prompt_tokens,
            tokens=answer.stream.num_tokens,
            total_ms=round((now_s - asked.arrived_s) * 1000, 3),
            phases_ms=milliseconds,
            error=str(error) or type(error).__name__ if error is not None else None,
        ),
    )


def trace_id(traceparent: str) -> str | None:
    """The trace in a header of https://www.w3.org/TR/trace-context; None where there is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None
