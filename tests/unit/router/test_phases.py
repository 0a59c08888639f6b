"""Phases of a request follow each other without gaps, whatever the clocks of its replicas show."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.clock import ClockReading, read_clock
from cluster.spec.ids import ReplicaId
from cluster.spec.phases import ComputedStep, PhaseTimes, PromptTimes
from router.phases import Phase, phases_of, totals_of

PREFILL, DECODE = ReplicaId("prefill-0"), ReplicaId("decode-0")
STEPS = [ComputedStep(15.0, 18.0, 1.0), ComputedStep(18.0, 20.0), ComputedStep(21.0, 22.0, 0.5)]
PHASES = [
    Phase("decode-queue", 10.0, 11.0, DECODE),
    Phase("bootstrap", 11.0, 13.0, PREFILL),
    Phase("storage", 13.0, 14.0, PREFILL),
    Phase("prefill-queue", 14.0, 15.0, PREFILL),
    Phase("prefill", 15.0, 18.0, PREFILL, 1.0),
    Phase("prefill", 18.0, 20.0, PREFILL),
    Phase("prefill-queue", 20.0, 21.0, PREFILL),
    Phase("prefill", 21.0, 22.0, PREFILL, 0.5),
    Phase("transfer", 22.0, 24.0, DECODE),
    Phase("delivery", 24.0, 25.0, DECODE),
]


def times_of(prompt: PromptTimes, clock: ClockReading) -> PhaseTimes:
    return PhaseTimes(decode=DECODE, clock=clock, granted_s=11.0, sent_s=24.0, prompt=prompt)


@pytest.mark.parametrize("lead_s", [0.0, 1000.0])
def test_every_wait_and_every_step_is_a_phase(lead_s: float) -> None:
    """``lead_s`` is how far the clock of the prefill replica's machine is ahead."""
    here = read_clock()
    there = ClockReading(machine="another" if lead_s else here.machine, unix_offset_s=here.unix_offset_s - lead_s)
    steps = [ComputedStep(step.start_s + lead_s, step.end_s + lead_s, step.communication_s) for step in STEPS]
    prompt = PromptTimes(replica=PREFILL, clock=there, stored_s=13.0 + lead_s, scheduled_s=14.0 + lead_s, steps=steps)
    found = phases_of(times_of(prompt, here), opened_s=10.0, first_s=25.0)
    assert [phase.name for phase in found] == [phase.name for phase in PHASES]
    for phase, expected in zip(found, PHASES, strict=True):
        assert (phase.replica, phase.communication_s) == (expected.replica, expected.communication_s)
        assert (phase.start_s, phase.end_s) == pytest.approx((expected.start_s, expected.end_s), abs=0.05)
    assert prompt.seconds == pytest.approx(8.0)


def test_totals_show_communication_apart() -> None:
    assert totals_of(PHASES) == {
        "decode-queue": 1.0,
        "bootstrap": 2.0,
        "storage": 1.0,
        "prefill-queue": 2.0,
        "prefill": 4.5,
        "communication": 1.5,
        "transfer": 2.0,
        "delivery": 1.0,
    }


def test_a_prompt_that_decode_computes_is_not_transferred() -> None:
    here = PromptTimes(replica=DECODE, stored_s=11.0, scheduled_s=11.0, steps=[ComputedStep(12.0, 24.0)])
    found = phases_of(times_of(here, here.clock), opened_s=10.0, first_s=25.0)
    assert [phase.name for phase in found] == ["decode-queue", "prefill-queue", "prefill", "delivery"]
    assert times_of(here, here.clock).prefill is None


ANY_S = st.floats(-100.0, 100.0)


@given(times_s=st.lists(ANY_S, min_size=4, max_size=20), opened_s=ANY_S, waited_s=st.floats(0.0, 100.0))
def test_phases_leave_no_gap_whatever_the_clocks_show(times_s: list[float], opened_s: float, waited_s: float) -> None:
    granted_s, stored_s, scheduled_s, sent_s, *rest = times_s
    steps = [ComputedStep(start_s, end_s, 1.0) for start_s, end_s in zip(rest[::2], rest[1::2], strict=False)]
    prompt = PromptTimes(replica=PREFILL, stored_s=stored_s, scheduled_s=scheduled_s, steps=steps)
    times = PhaseTimes(decode=DECODE, granted_s=granted_s, sent_s=sent_s, prompt=prompt)
    found, first_s = phases_of(times, opened_s, opened_s + waited_s), opened_s + waited_s
    assert (found[0].start_s, found[-1].end_s) == (opened_s, first_s)
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(found))
    assert all(0 <= phase.communication_s <= phase.seconds for phase in found)
    assert sum(totals_of(found).values()) == pytest.approx(waited_s, abs=1e-6)
