"""Rules of the supervisor, event by event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.errors import BatonError
from cluster.spec.ids import Incarnation
from cluster.supervisor.commands import StatusCommand
from cluster.supervisor.events import (
    Action,
    Announce,
    ClusterDrained,
    CommandAnswer,
    DrainCluster,
    End,
    Ended,
    Failed,
    Kill,
    MarkEnded,
    Outcome,
    Prove,
    Proven,
    Start,
    Started,
    Stop,
    Stopped,
    StopRequested,
    Tick,
)
from cluster.supervisor.reconcile import backoff_s, next_incarnation
from cluster.supervisor.state import MAX_BACKOFF_S, STABLE_S, ClusterPhase, MemberState
from tests.fakes.supervised import ERROR, NAMES, UNIX_MS, Run


def test_everything_starts_at_once() -> None:
    run = Run()
    assert run.step(Tick()) == [Start(name, Incarnation(UNIX_MS)) for name in NAMES]
    assert run.step(Tick()) == []


def test_announced_when_the_last_member_is_up() -> None:
    run = Run()
    run.step(Tick())
    for name in NAMES[:-1]:
        assert run.step(Started(name, run.incarnation(name))) == []
    assert run.step(Started(NAMES[-1], run.incarnation(NAMES[-1]))) == [Announce()]


def test_failure_before_the_first_announcement_ends_it_all() -> None:
    run = Run()
    run.step(Tick())
    assert run.fail("prefill-0") == [Stop()]
    assert run.cluster.failure is ERROR
    assert run.fail("decode-0") == []
    assert run.cluster.failure is ERROR
    assert run.step(Stopped()) == []
    assert run.cluster.phase is ClusterPhase.STOPPED


def test_dead_rank_restarts_its_replica() -> None:
    run = Run().serve()
    first = run.incarnation("prefill-0")
    assert run.fail("prefill-0") == [End("prefill-0", first)]
    assert run.lines == [f"prefill-0: failed, incarnation {first}: rank 1: no memory (baton logs prefill-0)"]
    assert run.fail("prefill-0") == [], "the gang's other ranks end with it"
    assert run.step(Ended("prefill-0", first, True)) == [MarkEnded("prefill-0", first, True)]
    run.now_s = 0.9
    assert run.step(Tick()) == []
    run.now_s = 1.0
    (start,) = run.step(Tick())
    assert isinstance(start, Start)
    assert start.incarnation > first
    assert run.step(Started("prefill-0", first)) == [], "an answer of the earlier start"
    assert run.state("prefill-0") is MemberState.STARTING
    run.step(Started("prefill-0", start.incarnation))
    assert run.state("prefill-0") is MemberState.RUNNING
    assert run.state("decode-0") is MemberState.RUNNING


def restart(run: Run, name: str, *, proven: bool, is_of_use: bool = True) -> tuple[Incarnation, list[Action]]:
    """Let a member fail and restart. Return the start that ended, and the actions that its end caused."""
    ended = run.incarnation(name)
    run.fail(name)
    actions = run.step(Ended(name, ended, proven))
    run.now_s += MAX_BACKOFF_S
    run.step(Tick())
    if is_of_use:
        run.step(Started(name, run.incarnation(name)))
    return ended, actions


def test_only_proof_marks_an_incarnation_reaped() -> None:
    run = Run().serve()
    ended, actions = restart(run, "decode-0", proven=False)
    assert actions == [Prove("decode-0", ended)]
    assert run.cluster.reaped == {}
    assert run.step(Proven("decode-0", ended)) == [MarkEnded("decode-0", ended, True)]


def test_a_proven_end_says_nothing_of_an_earlier_start_that_may_still_write() -> None:
    run = Run().serve()
    first, _ = restart(run, "prefill-0", proven=False)
    second, actions = restart(run, "prefill-0", proven=True)
    assert actions == []
    assert run.cluster.reaped == {}
    assert run.step(Proven("prefill-0", first)) == [MarkEnded("prefill-0", second, True)]


def test_a_start_unknown_to_the_driver_may_still_write() -> None:
    run = Run().serve()
    restart(run, "prefill-0", proven=True, is_of_use=False)
    second, actions = restart(run, "prefill-0", proven=False, is_of_use=False)
    assert actions == [Prove("prefill-0", second)]
    third, actions = restart(run, "prefill-0", proven=True)
    assert actions == []
    assert run.step(Proven("prefill-0", second)) == [MarkEnded("prefill-0", third, True)]


def test_services_are_restarted_and_replicas_hear_of_the_routers_end() -> None:
    run = Run().serve()
    for name in ("bootstrap", "router"):
        first = run.incarnation(name)
        run.fail(name)
        marks = [MarkEnded(name, first, True)] if name == "router" else []
        assert run.step(Ended(name, first, True)) == marks
        assert run.state(name) is MemberState.WAITING
    run.now_s = 1.0
    assert {action.name for action in run.step(Tick()) if isinstance(action, Start)} == {"bootstrap", "router"}


@pytest.mark.parametrize("proven", [True, False], ids=["gone", "may wake up"])
def test_a_new_bootstrap_service_learns_of_ended_starts(proven: bool) -> None:
    run = Run().serve()
    ended = run.incarnation("decode-0")
    run.fail("decode-0")
    run.step(Ended("decode-0", ended, proven))
    run.fail("bootstrap")
    run.step(Ended("bootstrap", run.incarnation("bootstrap"), True))
    run.now_s = 1.0
    run.step(Tick())
    assert run.step(Started("bootstrap", run.incarnation("bootstrap"))) == [MarkEnded("decode-0", ended, proven)]


def test_waits_double_and_a_stable_run_resets_them() -> None:
    run = Run().serve()
    waits = []
    for _ in range(9):
        run.fail("prefill-0")
        run.step(Ended("prefill-0", run.incarnation("prefill-0"), True))
        waits.append(run.cluster.members["prefill-0"].wake_s - run.now_s)
        run.now_s = run.cluster.members["prefill-0"].wake_s
        run.step(Tick())
        run.step(Started("prefill-0", run.incarnation("prefill-0")))
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    run.now_s += STABLE_S
    run.fail("prefill-0")
    run.step(Ended("prefill-0", run.incarnation("prefill-0"), True))
    assert run.lines == ["prefill-0: restarts in 1 s"]


def test_crash_loop_is_reported_with_its_length() -> None:
    run = Run().serve()
    for _ in range(2):
        run.fail("prefill-0")
        run.step(Ended("prefill-0", run.incarnation("prefill-0"), True))
        run.now_s += MAX_BACKOFF_S
        run.step(Tick())
    run.fail("prefill-0")
    run.step(Ended("prefill-0", run.incarnation("prefill-0"), True))
    assert run.lines == ["prefill-0: restarts in 4 s; failed 3 times in a row; first error: rank 1: no memory"]


def test_status_reports_stopped_members_with_their_first_error() -> None:
    run = Run().serve()
    assert answer_of(run) == ""
    for error in (ERROR, BatonError("it was killed")):
        run.step(Failed("decode-0", run.incarnation("decode-0"), error))
        run.step(Ended("decode-0", run.incarnation("decode-0"), True))
        run.now_s += MAX_BACKOFF_S
        run.step(Tick())
    assert answer_of(run) == "decode-0: starting; failed 2 times in a row; first error: rank 1: no memory"
    run.step(Started("decode-0", run.incarnation("decode-0")))
    assert answer_of(run) == ""


def answer_of(run: Run) -> str:
    (answer,) = run.command(StatusCommand())
    assert isinstance(answer, CommandAnswer)
    assert answer.outcome is Outcome.DONE
    return answer.line


def test_stop_drains_then_stops() -> None:
    run = Run().serve()
    assert run.step(StopRequested("SIGINT")) == [DrainCluster()]
    assert run.fail("prefill-0") == [], "nothing is replaced any more"
    assert run.cluster.next_wake_s() is None
    assert run.step(ClusterDrained(True)) == [Stop()]
    assert run.step(Stopped()) == []
    assert (run.cluster.phase, run.cluster.failure) == (ClusterPhase.STOPPED, None)


def test_second_stop_kills() -> None:
    run = Run().serve()
    run.step(StopRequested("SIGINT"))
    assert run.step(StopRequested("SIGINT")) == [Kill()]
    assert run.lines == ["SIGINT: stopping immediately"]
    assert run.step(ClusterDrained(False)) == []
    assert run.lines == [], "nobody waits for the drain any more"
    assert run.step(StopRequested("SIGINT")) == [], "there is nothing faster"
    assert run.step(Stopped()) == []
    assert run.cluster.phase is ClusterPhase.STOPPED


def test_second_stop_overtakes_a_stop_in_order() -> None:
    run = Run().serve()
    run.step(StopRequested("SIGINT"))
    assert run.step(ClusterDrained(True)) == [Stop()]
    assert run.step(StopRequested("SIGINT")) == [Kill()]
    for _ in ("of the stop", "of the kill"):
        assert run.step(Stopped()) == []
        assert run.cluster.phase is ClusterPhase.STOPPED


def test_stop_while_starting_does_not_drain() -> None:
    run = Run()
    run.step(Tick())
    assert run.step(StopRequested("SIGTERM")) == [Stop()]
    assert run.step(Started("router", run.incarnation("router"))) == []


def test_next_wake_is_the_earliest_waiting_member() -> None:
    run = Run().serve()
    assert run.cluster.next_wake_s() is None
    for name, at_s in (("prefill-0", 5.0), ("decode-0", 4.0)):
        run.now_s = at_s
        run.fail(name)
        run.step(Ended(name, run.incarnation(name), True))
    assert run.cluster.next_wake_s() == 5.0


@given(st.integers(0, 2**53), st.integers(1, 2**53))
def test_incarnations_grow(previous: int, unix_ms: int) -> None:
    following = next_incarnation(Incarnation(previous), unix_ms)
    assert following > previous
    assert following >= unix_ms


@given(st.floats(0.01, 10), st.integers(1, 10_000))
def test_backoff_stays_within_a_minute(first_s: float, num_failures: int) -> None:
    assert min(first_s, MAX_BACKOFF_S) <= backoff_s(first_s, num_failures) <= MAX_BACKOFF_S
