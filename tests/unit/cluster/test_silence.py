"""Restarts of members that are silent for too long."""

import pytest

from cluster.supervisor.commands import RestartCommand
from cluster.supervisor.events import (
    Action,
    End,
    Ended,
    Examine,
    Examined,
    Kill,
    RouterSeen,
    Start,
    Started,
    Stopped,
    StopRequested,
    SystemLost,
    TableLost,
    TableSeen,
    TableUnchanged,
    Tick,
)
from cluster.supervisor.silence import ANSWER_S, MAX_LATE_S
from cluster.supervisor.state import LOOK_S, ClusterPhase
from tests.fakes.supervised import NAMES, PATIENCE_S, Run


def see(run: Run, *quiet: str, ranks: dict[str, tuple[int, ...]] | None = None) -> list[Action]:
    """Show the supervisor a table in which some replicas are not ready."""
    ready = frozenset((name, run.incarnation(name)) for name in NAMES if name not in quiet)
    return run.step(TableSeen(ready, frozenset(), ranks or {}))


def at(run: Run, now_s: float, *, answers: bool = True, lives: bool | None = True) -> list[Action]:
    """Return the actions until a time, of a driver that is never late.

    Args:
        answers: whether the bootstrap service answers that the table has not changed.
        lives: what the actor system says about the processes of silent members.
    """
    actions: list[Action] = []
    while (due_s := run.cluster.next_wake_s()) is not None and due_s < now_s:
        run.now_s = due_s
        actions += look(run, answers, lives)
    run.now_s = now_s
    return [*actions, *look(run, answers, lives)]


def look(run: Run, answers: bool, lives: bool | None) -> list[Action]:
    actions: list[Action] = []
    for action in run.step(TableUnchanged() if answers else Tick()):
        if isinstance(action, Examine):
            actions += run.step(Examined(action.name, action.incarnation, lives))
        else:
            actions.append(action)
    return actions


def test_a_replica_with_a_silent_rank_is_ended_when_patience_is_over() -> None:
    run = Run().serve()
    incarnation = run.incarnation("prefill-0")
    assert see(run, "prefill-0", ranks={"prefill-0": (1,)}) == []
    assert run.cluster.next_wake_s() == LOOK_S
    assert at(run, PATIENCE_S - 0.1) == []
    assert see(run, "prefill-0", ranks={"prefill-0": (1,)}) == [], "silent for as long as before"
    assert at(run, PATIENCE_S) == [End("prefill-0", incarnation)]
    assert run.lines == [
        f"prefill-0: failed, incarnation {incarnation}: no heartbeat from rank 1 "
        "for longer than resources.silence_s allows; its processes are alive (baton logs prefill-0)"
    ]
    run.step(Ended("prefill-0", incarnation, True))
    run.now_s += 1.0
    (start,) = run.step(Tick())
    assert isinstance(start, Start)
    assert start.incarnation > incarnation


def test_a_member_that_responds_in_time_stays() -> None:
    run = Run().serve()
    see(run, "prefill-0")
    at(run, PATIENCE_S - 1.0)
    see(run)
    assert run.cluster.next_wake_s() is None
    assert see(run, "prefill-0") == []
    assert at(run, PATIENCE_S + 1.0) == []
    assert at(run, 2 * PATIENCE_S - 1.0) == [End("prefill-0", run.incarnation("prefill-0"))]


def test_a_new_start_is_not_blamed_for_its_predecessors_silence() -> None:
    run = Run().serve()
    see(run, "decode-0")
    first = run.incarnation("decode-0")
    at(run, PATIENCE_S)
    run.step(Ended("decode-0", first, False))
    run.now_s += 1.0
    run.step(Tick())
    run.step(Started("decode-0", run.incarnation("decode-0")))
    run.step(TableSeen(frozenset({("prefill-0", run.incarnation("prefill-0"))}), frozenset(), {}))
    assert at(run, run.now_s + PATIENCE_S - 0.1) == []


def test_while_the_table_is_missing_only_the_bootstrap_service_is_silent() -> None:
    run = Run().serve()
    see(run, "prefill-0", "decode-0")
    run.now_s = 1.0
    run.step(TableLost())
    assert at(run, PATIENCE_S + 0.9, answers=False) == []
    assert at(run, PATIENCE_S + 1.0, answers=False) == [End("bootstrap", run.incarnation("bootstrap"))]
    run.step(TableLost())
    assert run.cluster.silent == {}, "it is being ended"


def test_a_replica_has_time_to_register_with_a_new_table() -> None:
    run = Run().serve()
    run.step(TableLost())
    at(run, PATIENCE_S - 1.0, answers=False)
    see(run, "prefill-0", "decode-0")
    assert at(run, PATIENCE_S + 1.0) == []
    see(run)
    assert at(run, 10 * PATIENCE_S) == []


def test_a_replica_that_drains_may_not_be_silent_either() -> None:
    run = Run().serve()
    run.command(RestartCommand(replicas=()))
    see(run, "decode-0")
    assert End("decode-0", run.incarnation("decode-0")) in at(run, PATIENCE_S)


@pytest.mark.parametrize("stands_from_s", [0.0, PATIENCE_S - LOOK_S])
def test_a_pause_of_the_driver_does_not_count_as_silence(stands_from_s: float) -> None:
    run = Run().serve()
    see(run, "prefill-0", "decode-0")
    assert at(run, stands_from_s) == []
    run.now_s = back_s = stands_from_s + LOOK_S + MAX_LATE_S + 0.1
    assert run.step(TableUnchanged()) == []
    assert run.lines == ["the driver was suspended for 1.1 s; the silence timers of all processes restart now"]
    assert at(run, back_s + PATIENCE_S - 0.1) == []
    see(run, "prefill-0")
    assert at(run, back_s + PATIENCE_S) == [End("prefill-0", run.incarnation("prefill-0"))]


def test_a_slightly_late_driver_still_detects_silence() -> None:
    run = Run().serve()
    see(run, "prefill-0")
    while run.now_s < PATIENCE_S:
        assert look(run, True, True) == []
        run.now_s += LOOK_S + 0.9 * MAX_LATE_S
    assert look(run, True, True) == [End("prefill-0", run.incarnation("prefill-0"))]


def test_time_without_an_answer_of_the_bootstrap_service_does_not_count() -> None:
    run = Run().serve()
    see(run, "prefill-0")
    at(run, 1.0)
    assert at(run, 30.0, answers=False) == [], "it may have shown life that only the table could report"
    late_s = 30.0 + LOOK_S - 1.0 - ANSWER_S
    assert at(run, PATIENCE_S + late_s - 0.1) == []
    assert at(run, PATIENCE_S + late_s) == [End("prefill-0", run.incarnation("prefill-0"))]


def test_a_silent_member_lives_on_while_the_actor_system_does_not_answer() -> None:
    run = Run().serve()
    incarnation = run.incarnation("prefill-0")
    see(run, "prefill-0")
    assert at(run, 2 * PATIENCE_S - 0.1, lives=None) == []
    assert at(run, 2 * PATIENCE_S, lives=False) == [End("prefill-0", incarnation)]
    assert run.lines[0].endswith("resources.silence_s allows; a process of it has died (baton logs prefill-0)")


def test_an_answer_about_a_member_that_has_shown_life_ends_nothing() -> None:
    run = Run().serve()
    see(run, "prefill-0")
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        at(run, now_s)
    run.now_s = PATIENCE_S
    incarnation = run.incarnation("prefill-0")
    assert run.step(TableUnchanged()) == [Examine("prefill-0", incarnation)]
    assert run.step(Tick()) == [], "it is being examined"
    see(run)
    see(run, "prefill-0")
    assert run.step(Examined("prefill-0", incarnation, True)) == []


def test_the_loss_of_the_actor_system_ends_the_cluster_with_an_error() -> None:
    for run in (Run(), Run().serve()):
        run.step(Tick())
        assert run.step(SystemLost("the raylet died")) == [Kill()]
        assert run.step(SystemLost("the raylet died")) == []
        run.step(Stopped())
        assert (run.cluster.phase, str(run.cluster.failure)) == (ClusterPhase.STOPPED, "the raylet died")


def test_an_idle_driver_has_not_paused() -> None:
    run = Run().serve()
    run.now_s = 1000.0
    see(run, "prefill-0")
    assert run.lines == []
    assert at(run, 1000.0 + PATIENCE_S) == [End("prefill-0", run.incarnation("prefill-0"))]


def test_silence_is_ignored_during_start_and_stop() -> None:
    run = Run()
    run.step(Tick())
    run.step(Started("prefill-0", run.incarnation("prefill-0")))
    see(run, "prefill-0")
    assert run.cluster.next_wake_s() is None
    assert at(run, 10 * PATIENCE_S) == []
    run = Run().serve()
    see(run, "prefill-0")
    run.step(StopRequested("SIGINT"))
    assert at(run, 10 * PATIENCE_S) == []
    assert run.cluster.phase is ClusterPhase.DRAINING


def test_an_unresponsive_router_is_ended_regardless_of_the_table() -> None:
    run = Run().serve()
    incarnation = run.incarnation("router")
    run.step(RouterSeen("router", responds=False))
    run.now_s = 1.0
    see(run)
    run.step(TableLost())
    see(run)
    run.step(RouterSeen("router", responds=False))
    assert at(run, PATIENCE_S - 0.1) == []
    assert at(run, PATIENCE_S) == [End("router", incarnation)]
    run.step(RouterSeen("router", responds=False))
    assert run.cluster.silent == {}, "it is being ended"


def test_a_router_that_responds_again_stays_without_effect_on_others() -> None:
    run = Run().serve()
    run.step(RouterSeen("router", responds=False))
    see(run, "decode-0")
    run.now_s = 1.0
    run.step(RouterSeen("router", responds=True))
    assert at(run, PATIENCE_S) == [End("decode-0", run.incarnation("decode-0"))]
    assert at(run, 3 * PATIENCE_S) == []
