"""The phases of one request one after another, for traces and for people."""

from collections.abc import Iterator
from dataclasses import dataclass

from router.answer import Answer


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a request, on the router's monotonic clock."""

    name: str
    start_s: float
    end_s: float
    replica: str | None = None


def phases_of(answer: Answer, now_s: float) -> Iterator[Phase]:
    """As far as it came. The wait for pages in decode is not among them, since it lies beside ``bootstrap``."""
    start_s = answer.opened_s
    yield Phase("queue", start_s - answer.queue_s, start_s)
    phases, first_s = answer.stream.phases, answer.stream.first_s
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
