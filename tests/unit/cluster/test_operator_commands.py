"""Operator commands, event by event."""

import pytest

from cluster.spec.errors import ConfigError, Problem
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.supervisor.commands import DrainCommand, OperatorCommand, RestartCommand, ResumeCommand, ScaleCommand
from cluster.supervisor.events import (
    Action,
    CommandAnswer,
    DrainReplica,
    End,
    Ended,
    Examined,
    MarkEnded,
    Outcome,
    Place,
    Placed,
    ReplicaDrained,
    ReplicaResumed,
    ResumeReplica,
    Start,
    Started,
    StopRequested,
    TableSeen,
    TableUnchanged,
    Tick,
)
from cluster.supervisor.state import ClusterPhase, MemberState
from tests.fakes.supervised import Run

TWO_OF_EACH = ("bootstrap", "router", "prefill-0", "prefill-1", "decode-0", "decode-1")


def answers(actions: list[Action]) -> list[tuple[Outcome, str]]:
    return [(action.outcome, action.line) for action in actions if isinstance(action, CommandAnswer)]


def go_on(run: Run, action: Action) -> list[Action]:
    """Answer an action like processes without failures."""
    match action:
        case DrainReplica(name, incarnation):
            return run.step(ReplicaDrained(name, incarnation, True))
        case ResumeReplica(name, incarnation):
            return run.step(ReplicaResumed(name, incarnation, True))
        case End(name, incarnation):
            return run.step(Ended(name, incarnation, True)) + run.step(Tick())
        case Start(name, incarnation):
            return run.step(Started(name, incarnation))
        case Place():
            return run.step(Placed(None)) + run.step(Tick())
        case _:
            return []


def carry_out(run: Run, command: OperatorCommand) -> list[Action]:
    """Carry out a command and return all actions."""
    actions = run.command(command)
    for action in actions:  # the list grows during iteration
        actions += go_on(run, action)
    return actions


def begun(actions: list[Action]) -> list[str]:
    return [f"{type(action).__name__} {action.name}" for action in actions if isinstance(action, DrainReplica | Start)]


def test_a_drain_is_over_when_the_replica_is_empty_and_leaves_it_running() -> None:
    run = Run(TWO_OF_EACH).serve()
    incarnation = run.incarnation("decode-0")
    assert run.command(DrainCommand(replica=ReplicaId("decode-0"), grace_s=3.0)) == [
        DrainReplica("decode-0", incarnation, 3.0)
    ]
    assert answers(run.step(ReplicaDrained("decode-0", incarnation, True))) == [(Outcome.DONE, "decode-0: drained")]
    assert run.state("decode-0") is MemberState.RUNNING
    actions = run.command(ResumeCommand(replica=ReplicaId("decode-0")))
    assert actions == [ResumeReplica("decode-0", incarnation)]
    resumed = ReplicaResumed("decode-0", incarnation, True)
    assert answers(run.step(resumed)) == [(Outcome.DONE, "decode-0: takes requests again")]
    assert run.step(resumed) == []


@pytest.mark.parametrize(
    "command", [DrainCommand(replica=ReplicaId("decode-0")), ResumeCommand(replica=ReplicaId("decode-0"))]
)
def test_an_order_ends_with_the_silence_of_its_replica(command: OperatorCommand) -> None:
    run = Run(TWO_OF_EACH).serve()
    run.command(command)
    lives = frozenset((name, run.incarnation(name)) for name in TWO_OF_EACH[2:] if name != "decode-0")
    run.step(TableSeen(ready=lives, draining=frozenset(), silent={"decode-0": [0]}))
    reported: list[Action] = []
    for _ in range(20):
        run.now_s += 1.0
        reported += run.step(TableUnchanged())
    reported += run.step(Examined("decode-0", run.incarnation("decode-0"), True))
    ((outcome, line),) = answers(reported)
    assert outcome is Outcome.FAILED
    assert line.startswith("decode-0: failed and is restarting: no heartbeat from rank 0")
    assert run.cluster.open_command is None


def test_an_unanswered_resume_fails_with_the_replicas_name() -> None:
    run = Run(TWO_OF_EACH).serve()
    incarnation = run.incarnation("decode-0")
    run.command(ResumeCommand(replica=ReplicaId("decode-0")))
    assert run.step(ReplicaResumed("decode-0", Incarnation(incarnation - 1), True)) == []
    ((outcome, line),) = answers(run.step(ReplicaResumed("decode-0", incarnation, False)))
    assert (outcome, line.partition(":")[0]) == (Outcome.FAILED, "decode-0")


def test_a_drain_timeout_is_reported_and_the_replica_is_unchanged() -> None:
    run = Run(TWO_OF_EACH).serve()
    run.command(DrainCommand(replica=ReplicaId("decode-0")))
    (answer,) = answers(run.step(ReplicaDrained("decode-0", run.incarnation("decode-0"), False)))
    assert answer == (Outcome.FAILED, "decode-0: some open requests did not end in time; the replica stays drained")
    assert run.state("decode-0") is MemberState.RUNNING


def test_a_rolling_restart_takes_one_replica_at_a_time() -> None:
    run = Run(TWO_OF_EACH).serve()
    before = {name: run.incarnation(name) for name in TWO_OF_EACH}
    actions = carry_out(run, RestartCommand(is_rolling=True))
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert begun(actions) == [line for name in names for line in (f"DrainReplica {name}", f"Start {name}")]
    assert answers(actions)[-1] == (Outcome.DONE, "restarted")
    assert [name for name in TWO_OF_EACH if run.incarnation(name) > before[name]] == names
    assert [action.name for action in actions if isinstance(action, MarkEnded)] == names
    assert run.cluster.members["decode-1"].num_failures == 0


def test_a_restart_at_once_drains_all_before_any_starts() -> None:
    actions = carry_out(Run().serve(), RestartCommand())
    assert begun(actions) == ["DrainReplica prefill-0", "DrainReplica decode-0", "Start prefill-0", "Start decode-0"]
    assert answers(actions)[-1] == (Outcome.DONE, "restarted")


def test_a_restart_begins_at_once_however_often_the_replica_has_failed() -> None:
    run = Run().serve()
    run.fail("decode-0")
    run.step(Ended("decode-0", run.incarnation("decode-0"), True))
    run.now_s = 1.0
    run.step(Tick())
    run.step(Started("decode-0", run.incarnation("decode-0")))
    carry_out(run, RestartCommand(replicas=(ReplicaId("decode-0"),)))
    assert run.state("decode-0") is MemberState.RUNNING
    assert run.now_s == 1.0


def test_a_replica_whose_drain_takes_too_long_is_restarted_anyway() -> None:
    run = Run().serve()
    incarnation = run.incarnation("decode-0")
    run.command(RestartCommand(replicas=(ReplicaId("decode-0"),)))
    assert run.step(ReplicaDrained("decode-0", incarnation, False)) == [End("decode-0", incarnation)]
    assert run.lines == ["decode-0: some open requests did not end in time"]


def test_a_failure_ends_a_rolling_restart_and_names_the_remaining_replicas() -> None:
    run = Run(TWO_OF_EACH).serve()
    run.command(RestartCommand(is_rolling=True))
    run.step(ReplicaDrained("prefill-0", run.incarnation("prefill-0"), True))
    run.step(Ended("prefill-0", run.incarnation("prefill-0"), True))
    run.step(Tick())
    (answer,) = answers(run.fail("prefill-0"))
    assert answer == (
        Outcome.FAILED,
        "prefill-0: failed and is restarting: rank 1: no memory; not restarted: prefill-1, decode-0, decode-1",
    )
    assert run.cluster.open_command is None
    assert run.state("prefill-0") is MemberState.ENDING


def test_a_rolling_restart_does_not_take_the_last_one_when_the_other_was_lost_on_the_way() -> None:
    run = Run(TWO_OF_EACH).serve()
    run.command(RestartCommand(is_rolling=True, replicas=(ReplicaId("decode-0"), ReplicaId("prefill-0"))))
    run.fail("prefill-1")
    run.step(ReplicaDrained("decode-0", run.incarnation("decode-0"), True))
    run.step(Ended("decode-0", run.incarnation("decode-0"), True))
    run.step(Tick())
    (answer,) = answers(run.step(Started("decode-0", run.incarnation("decode-0"))))
    assert answer[0] is Outcome.FAILED
    reason = "prefill-0: no other prefill replica takes requests; `baton scale prefill=3` adds one"
    assert answer[1] == f"{reason}; not restarted: prefill-0"
    assert run.state("prefill-0") is MemberState.RUNNING


def test_more_replicas_are_placed_then_started() -> None:
    run = Run().serve()
    actions = carry_out(run, ScaleCommand(prefill=3, decode=2, wait_s=7.0))
    assert actions[0] == Place(["prefill-1", "prefill-2", "decode-1"], wait_s=7.0)
    assert begun(actions) == ["Start prefill-1", "Start prefill-2", "Start decode-1"]
    assert answers(actions) == [(Outcome.DONE, "prefill: 3, decode: 2")]


def test_without_capacity_nothing_changes() -> None:
    run = Run(TWO_OF_EACH).serve()
    before = run.cluster
    assert run.command(ScaleCommand(prefill=9, decode=1))[0] == Place([f"prefill-{index}" for index in range(2, 9)])
    refusal = ConfigError([Problem("resources", "wanted: 7 workers; capacity for 2 workers")])
    (answer,) = answers(run.step(Placed(refusal)))
    assert answer == (Outcome.REFUSED, "resources: wanted: 7 workers; capacity for 2 workers")
    assert run.cluster == before


def test_removed_replicas_drain_first_and_return_as_later_starts() -> None:
    run = Run(TWO_OF_EACH).serve()
    first = run.incarnation("decode-1")
    actions = carry_out(run, ScaleCommand(decode=1))
    assert begun(actions) == ["DrainReplica decode-1"]
    assert MarkEnded("decode-1", first, True) in actions
    assert answers(actions) == [(Outcome.DONE, "decode: 1")]
    assert run.state("decode-1") is MemberState.REMOVED
    assert run.cluster.next_wake_s() is None
    carry_out(run, ScaleCommand(decode=2))
    assert run.incarnation("decode-1") > first
    assert run.state("decode-1") is MemberState.RUNNING


def test_a_replica_that_waits_for_its_restart_is_removed_immediately() -> None:
    run = Run(TWO_OF_EACH).serve()
    run.fail("decode-1")
    run.step(Ended("decode-1", run.incarnation("decode-1"), True))
    assert answers(run.command(ScaleCommand(decode=1))) == [(Outcome.DONE, "decode: 1")]
    assert run.state("decode-1") is MemberState.REMOVED


def test_a_starting_replica_is_removed_once_it_runs() -> None:
    run = Run(TWO_OF_EACH).serve()
    run.fail("decode-1")
    run.step(Ended("decode-1", run.incarnation("decode-1"), True))
    run.now_s = 1.0
    run.step(Tick())
    assert run.command(ScaleCommand(decode=1)) == []
    started = run.step(Started("decode-1", run.incarnation("decode-1")))
    assert begun(started) == ["DrainReplica decode-1"]


def test_a_replica_that_dies_while_it_drains_is_removed() -> None:
    run = Run(TWO_OF_EACH).serve()
    run.command(ScaleCommand(decode=1))
    incarnation = run.incarnation("decode-1")
    assert run.fail("decode-1") == [End("decode-1", incarnation)]
    assert run.step(ReplicaDrained("decode-1", incarnation, False)) == []
    assert answers(run.step(Ended("decode-1", incarnation, True))) == [(Outcome.DONE, "decode: 1")]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            DrainCommand(replica=ReplicaId("decode-7")),
            "got 'decode-7'; allowed: prefill-0, decode-0, decode-1",
        ),
        (RestartCommand(replicas=(ReplicaId("router"),)), "got 'router'; allowed"),
        (RestartCommand(replicas=(ReplicaId("prefil-0"),), is_rolling=True), "got 'prefil-0'; allowed"),
        (DrainCommand(replica=ReplicaId("prefill-0")), "prefill-0: no other prefill replica takes requests"),
        (RestartCommand(is_rolling=True), "prefill-0: no other prefill replica takes requests"),
        (ScaleCommand(decode=0), "got decode=0; allowed: prefill and decode from 1 to 4096"),
        (ScaleCommand(), "got nothing"),
    ],
)
def test_impossible_commands_are_refused_in_one_line(command: OperatorCommand, reason: str) -> None:
    run = Run(("bootstrap", "router", "prefill-0", "decode-0", "decode-1")).serve()
    before = run.cluster
    ((outcome, line),) = answers(run.command(command))
    assert outcome is Outcome.REFUSED
    assert reason in line
    assert "\n" not in line
    assert run.cluster == before


def test_a_replica_that_drains_does_not_count_and_its_next_start_does() -> None:
    run = Run(TWO_OF_EACH).serve()
    all_ready = frozenset((name, run.incarnation(name)) for name in TWO_OF_EACH)
    run.step(TableSeen(all_ready, frozenset({("decode-0", run.incarnation("decode-0"))}), {}))
    ((outcome, _),) = answers(run.command(DrainCommand(replica=ReplicaId("decode-1"))))
    assert outcome is Outcome.REFUSED
    ((outcome, line),) = answers(run.command(ScaleCommand(decode=1)))
    assert (outcome, "decode-1" in line) == (Outcome.REFUSED, True)
    carry_out(run, RestartCommand(replicas=(ReplicaId("decode-0"),)))
    assert begun(run.command(DrainCommand(replica=ReplicaId("decode-1")))) == ["DrainReplica decode-1"]


@pytest.mark.parametrize(
    "command",
    [
        DrainCommand(replica=ReplicaId("decode-1")),
        RestartCommand(replicas=(ReplicaId("decode-1"),), is_rolling=True),
        ScaleCommand(decode=1),
    ],
)
def test_a_silent_replica_does_not_count_until_it_is_heard_again(command: OperatorCommand) -> None:
    run = Run(TWO_OF_EACH).serve()
    ready = frozenset((name, run.incarnation(name)) for name in TWO_OF_EACH)
    run.step(TableSeen(ready - {("decode-0", run.incarnation("decode-0"))}, frozenset(), {"decode-0": [0]}))
    ((outcome, _),) = answers(run.command(command))
    assert outcome is Outcome.REFUSED
    run.step(TableSeen(ready, frozenset(), {}))
    assert begun(run.command(command)) == ["DrainReplica decode-1"]


def test_one_order_at_a_time_and_only_while_serving() -> None:
    run = Run(TWO_OF_EACH)
    run.step(Tick())
    assert answers(run.command(ScaleCommand(decode=1)))[0][0] is Outcome.REFUSED
    run.serve()
    run.command(DrainCommand(replica=ReplicaId("decode-0")))
    ((outcome, line),) = answers(run.command(ResumeCommand(replica=ReplicaId("decode-0"))))
    assert (outcome, line) == (Outcome.REFUSED, "another command is in progress; try again when it has finished")


def test_a_stop_ends_the_current_order() -> None:
    run = Run(TWO_OF_EACH).serve()
    run.command(RestartCommand(is_rolling=True))
    assert answers(run.step(StopRequested("SIGINT"))) == [(Outcome.FAILED, "the cluster is stopping")]
    assert run.cluster.phase is ClusterPhase.DRAINING
