"""HTTP requests as jobs, and their records when they have ended: for the status page and the access log."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cluster.logs import with_facts
from router.answer import Answer
from router.key_ring import ApiKey
from router.request import GenerateRequest
from router.text import TextRules

_log = logging.getLogger(__name__)

MAX_RECENT = 50
TRACEPARENT = "traceparent"
"""Header of https://www.w3.org/TR/trace-context."""


class Phase(msgspec.Struct, frozen=True):
    """Part of a request, on the router's monotonic clock."""

    name: str
    start_s: float
    end_s: float
    replica: str | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request, ready to be sent to replicas."""

    caller: ApiKey | None
    """Owner of its key; None where no key is needed."""
    requests: Sequence[GenerateRequest]
    """One for every choice; those of one prompt stand together."""
    num_choices: int
    num_prompt_tokens: int
    """Each prompt counts once, however many choices it has."""
    rules: TextRules
    arrived_s: float
    request_id: str
    traceparent: str
    """The client's OpenTelemetry trace; empty for none."""


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request that has ended."""

    job: Job
    answer: Answer
    outcome: str
    error: BaseException | None
    ended_s: float
    unix_s: float

    def summary(self) -> dict[str, Any]:
        """Return what the status page shows, times in seconds."""
        phases = phases_of(self.answer, self.ended_s)
        return {
            "ended": self.unix_s,
            "seconds": self.ended_s - self.job.arrived_s,
            "prompt_tokens": self.job.num_prompt_tokens,
            "num_tokens": self.answer.num_tokens,
            "outcome": self.outcome,
            "phases": [
                {"name": phase.name, "seconds": phase.end_s - phase.start_s, "replica": phase.replica}
                for phase in phases
            ],
        }

    def log(self) -> None:
        answer, rooms, phases = self.answer, self.answer.request_ids, phases_of(self.answer, self.ended_s)
        _log.info(
            "request %s",
            self.outcome,
            extra=with_facts(
                request_id=self.job.request_id,
                key=self.job.caller.name if self.job.caller is not None else None,
                room=rooms[0] if len(rooms) == 1 else None,
                rooms=rooms if len(rooms) > 1 else None,
                prefill=answer.headers["x-baton-prefill"] or None,
                decode=answer.headers["x-baton-decode"] or None,
                trace_id=trace_id(answer.trace_header.get(TRACEPARENT, self.job.traceparent)),
                prompt_tokens=self.job.num_prompt_tokens,
                tokens=answer.num_tokens,
                total_ms=round((self.ended_s - self.job.arrived_s) * 1000, 3),
                phases_ms={phase.name: round((phase.end_s - phase.start_s) * 1000, 3) for phase in phases},
                error=str(self.error) or type(self.error).__name__ if self.error is not None else None,
            ),
        )


def phases_of(answer: Answer, now_s: float) -> Iterator[Phase]:
    """Yield the phases one after another, as far as the request came.

    The wait for pages in decode is left out, since it overlaps ``bootstrap``.
    """
    start_s = answer.opened_s
    yield Phase("queue", start_s - answer.queue_s, start_s)
    phases, first_s = answer.phases, answer.first_s
    if phases is not None:
        for name, seconds, replica in (
            ("bootstrap", phases.bootstrap_s, phases.prefill),
            ("prefill", phases.prefill_s, phases.prefill or phases.decode),
            ("transfer", phases.transfer_s, phases.decode),
        ):
            yield Phase(name, start_s, start_s + seconds, replica)
            start_s += seconds
    if first_s is not None:
        yield Phase("decode", first_s, now_s, phases.decode if phases is not None else None)


def trace_id(traceparent: str) -> str | None:
    """Return the trace in a header of https://www.w3.org/TR/trace-context; None where there is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None
