"""Consecutive phases of a request on the router's clock, from its head to its last token."""

from collections.abc import Iterable, Iterator

import msgspec

from cluster.spec.clock import read_clock
from cluster.spec.ids import ReplicaId
from cluster.spec.phases import PhaseTimes


class Phase(msgspec.Struct, frozen=True):
    name: str
    start_s: float
    end_s: float
    replica: ReplicaId | None = None
    communication_s: float = 0.0
    """Part of the phase that ranks spent in collectives."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def phases_of(times: PhaseTimes, opened_s: float, first_s: float) -> list[Phase]:
    """Return the phases from sending a request to replicas, at ``opened_s``, to its first token, at ``first_s``.

    Clocks of several machines may disagree by less than a message takes, so a bound before the last one is moved to it.
    """
    phases, start_s = [], opened_s
    for name, end_s, replica, communication_s in _bounds(times):
        end_s = min(max(start_s, end_s), first_s)
        if end_s > start_s:
            phases.append(Phase(name, start_s, end_s, replica, min(communication_s, end_s - start_s)))
        start_s = end_s
    return [*phases, Phase("delivery", start_s, first_s, times.decode)]


def totals_of(phases: Iterable[Phase]) -> dict[str, float]:
    """Return the seconds of each phase by name, in order of first occurrence. Communication is a phase of its own."""
    totals: dict[str, float] = {}
    for phase in phases:
        own_s = phase.seconds - phase.communication_s
        totals[phase.name] = totals.get(phase.name, 0.0) + own_s
        if phase.communication_s:
            totals["communication"] = totals.get("communication", 0.0) + phase.communication_s
    return totals


def _bounds(times: PhaseTimes) -> Iterator[tuple[str, float, ReplicaId, float]]:
    """Yield name, end, replica and communication of each phase in replicas."""
    prompt, here = times.prompt, read_clock()
    decode_s, prompt_s = times.clock.shift_s(here), prompt.clock.shift_s(here)
    yield "decode-queue", times.granted_s + decode_s, times.decode, 0.0
    yield "bootstrap", prompt.stored_s + prompt_s, prompt.replica, 0.0
    yield "storage", prompt.scheduled_s + prompt_s, prompt.replica, 0.0
    for step in prompt.steps:
        yield "prefill-queue", step.start_s + prompt_s, prompt.replica, 0.0
        yield "prefill", step.end_s + prompt_s, prompt.replica, step.communication_s
    yield "transfer", times.sent_s + decode_s, times.decode, 0.0
