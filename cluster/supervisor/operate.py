"""Execution of operator commands, one at a time, in pure functions.

A replica that a command removes or restarts is drained first, within the grace period. A failure ends the command with
an error. The supervisor still restores every desired replica.
"""

from collections.abc import Collection
from dataclasses import replace

from cluster.spec.config import MOST_REPLICAS
from cluster.spec.ids import ReplicaId, Role, replica_id, role_of
from cluster.supervisor import events
from cluster.supervisor.commands import (
    DrainCommand,
    OperatorCommand,
    RestartCommand,
    ResumeCommand,
    ScaleCommand,
    StatusCommand,
)
from cluster.supervisor.events import Action, Event, Outcome
from cluster.supervisor.state import Cluster, ClusterPhase, Member, MemberState, Now, OpenCommand

Step = tuple[Cluster, list[Action]]


def on_command(cluster: Cluster, event: events.CommandReceived, now: Now) -> Step:
    if isinstance(event.command, StatusCommand):
        return cluster, [events.CommandAnswer(event.number, "\n".join(_troubles(cluster)), Outcome.DONE)]
    if reason := _refusal(cluster, event.command):
        return cluster, [events.CommandAnswer(event.number, reason, Outcome.REFUSED)]
    opened = replace(cluster, open_command=OpenCommand(number=event.number, command=event.command))
    match event.command:
        case DrainCommand(replica=name):
            drain = _drain(opened, cluster.members[name])
            return _with_command(opened, at_work=frozenset({name}), is_waiting=True), [drain]
        case ResumeCommand(replica=name):
            resume = events.ResumeReplica(name, cluster.members[name].incarnation)
            return _with_command(opened, at_work=frozenset({name}), is_waiting=True), [resume]
        case RestartCommand():
            names = tuple(dict.fromkeys(event.command.replicas)) or _running(cluster)
            return _with_command(opened, todo=names), []
        case ScaleCommand():
            missing, _ = _difference(cluster, event.command)
            if missing:
                return _with_command(opened, is_waiting=True), [events.Place(missing, event.command.wait_s)]
            return _rescale(opened, event.command, now)


def _troubles(cluster: Cluster) -> list[str]:
    phase = [] if cluster.phase is ClusterPhase.SERVING else [f"the cluster is {cluster.phase}"]
    return phase + [
        f"{member.name}: {member.state}{failures_of(member)}"
        for member in cluster.members.values()
        if member.state not in (MemberState.RUNNING, MemberState.REMOVED)
    ]


def failures_of(member: Member) -> str:
    """Return the number of consecutive failures and the first error, to append to a line about a member."""
    if not member.num_failures:
        return ""
    times = "once" if member.num_failures == 1 else f"{member.num_failures} times in a row"
    return f"; failed {times}; first error: {member.first_error}"


def on_placed(cluster: Cluster, event: events.Placed, now: Now) -> Step:
    """Continue scaling if the new replicas have been placed; otherwise refuse the command."""
    opened = cluster.open_command
    if opened is None or not isinstance(opened.command, ScaleCommand) or not opened.is_waiting:
        return cluster, []
    if event.refusal is not None:
        return _close(cluster, str(event.refusal), Outcome.REFUSED)
    return _rescale(_with_command(cluster), opened.command, now)


def on_replica_drained(cluster: Cluster, event: events.ReplicaDrained) -> Step:
    member = cluster.addressed(event.name, event.incarnation, MemberState.RUNNING, MemberState.DRAINING)
    if member is None:
        return cluster, []
    late = [] if event.complete else [events.Report(f"{event.name}: some open requests did not end in time")]
    if member.state is MemberState.DRAINING:
        ending = replace(member.moved(MemberState.ENDING, "drained"), num_failures=0)
        return cluster.with_member(ending), [*late, events.End(event.name, event.incarnation)]
    if not _awaits(cluster, DrainCommand, event.name):
        return cluster, []
    if event.complete:
        return _close(cluster, f"{event.name}: drained")
    reason = f"{event.name}: some open requests did not end in time; the replica stays drained"
    return _close(cluster, reason, Outcome.FAILED)


def on_replica_resumed(cluster: Cluster, event: events.ReplicaResumed) -> Step:
    member = cluster.addressed(event.name, event.incarnation, MemberState.RUNNING)
    if member is None or not _awaits(cluster, ResumeCommand, event.name):
        return cluster, []
    if event.complete:
        return _close(cluster, f"{event.name}: takes requests again")
    return _close(cluster, f"{event.name}: did not confirm that it takes requests again", Outcome.FAILED)


def _awaits(cluster: Cluster, kind: type[DrainCommand | ResumeCommand], name: str) -> bool:
    """Return whether the open command is of this kind and for this replica."""
    opened = cluster.open_command
    return opened is not None and isinstance(opened.command, kind) and opened.command.replica == name


def advance(cluster: Cluster, event: Event) -> Step:
    """End members that are no longer desired, and continue the open command; called after each event."""
    if cluster.phase is not ClusterPhase.SERVING:
        if cluster.open_command is None:
            return cluster, []
        return _close(cluster, "the cluster is stopping", Outcome.FAILED)
    actions: list[Action] = []
    for member in list(cluster.members.values()):
        if member.state is MemberState.RUNNING and not member.is_desired:
            cluster, begun = _begin_end(cluster, member.name)
            actions += begun
    opened = cluster.open_command
    if opened is None:
        return cluster, actions
    if name := _failed_with(cluster, opened, event):
        left = f"; not restarted: {', '.join(opened.todo)}" if opened.todo else ""
        why = event.error if isinstance(event, events.Failed) else cluster.members[name].first_error
        line = f"{name}: failed and is restarting: {why}{left}"
        cluster, more = _close(cluster, line, Outcome.FAILED)
    elif opened.is_waiting or not all(cluster.members[name].is_settled for name in opened.at_work):
        more = []
    else:
        cluster, more = _next_turn(cluster, opened) if opened.todo else _close(cluster, _summary(opened))
    return cluster, [*actions, *more]


def _next_turn(cluster: Cluster, opened: OpenCommand) -> Step:
    """Restart the next replica if the restart is rolling, otherwise all of them."""
    assert isinstance(opened.command, RestartCommand)
    number = 1 if opened.command.is_rolling else len(opened.todo)
    names, todo = opened.todo[:number], opened.todo[number:]
    for name in names:
        reason = _why_not_running(cluster, name) or (opened.command.is_rolling and _why_needed(cluster, name))
        if reason:
            return _close(cluster, f"{reason}; not restarted: {', '.join(opened.todo)}", Outcome.FAILED)
    cluster = _with_command(cluster, at_work=frozenset(names), todo=todo)
    actions: list[Action] = []
    for name in names:
        cluster, begun = _begin_end(cluster, name)
        actions += [*begun, events.CommandAnswer(opened.number, f"{name}: restarting", Outcome.GOING_ON)]
    return cluster, actions


def _rescale(cluster: Cluster, command: ScaleCommand, now: Now) -> Step:
    """Add missing replicas and drain surplus ones; ``advance`` completes the command."""
    missing, extra = _difference(cluster, command)
    for name in missing:
        member = cluster.members.get(name, Member(name=name))
        if member.state is MemberState.REMOVED:
            member = replace(member.moved(MemberState.WAITING, "scale"), num_failures=0)
        cluster = cluster.with_member(replace(member, wake_s=now.s, is_desired=True))
    for name in extra:
        member = replace(cluster.members[name], is_desired=False)
        if member.state is MemberState.WAITING:
            member = member.moved(MemberState.REMOVED, "scale")
        cluster = cluster.with_member(member)
    return _with_command(cluster, at_work=frozenset([*missing, *extra])), []


def _begin_end(cluster: Cluster, name: str) -> Step:
    member = cluster.members[name].moved(MemberState.DRAINING, "command")
    return cluster.with_member(member), [events.Report(f"{name}: draining"), _drain(cluster, member)]


def _drain(cluster: Cluster, member: Member) -> events.DrainReplica:
    command = cluster.open_command.command if cluster.open_command is not None else None
    grace_s = None if command is None or isinstance(command, ResumeCommand | StatusCommand) else command.grace_s
    return events.DrainReplica(member.name, member.incarnation, grace_s)


def _failed_with(cluster: Cluster, opened: OpenCommand, event: Event) -> str | None:
    """Return the command's replica that failed with this event: reported by a Failed, or found silent."""
    if not isinstance(event, events.Failed | events.Examined) or event.name not in opened.at_work:
        return None
    member = cluster.members[event.name]
    has_failed = member.state is MemberState.ENDING and member.num_failures > 0 and member.is_desired
    return member.name if has_failed else None


def _summary(opened: OpenCommand) -> str:
    if isinstance(opened.command, ScaleCommand):
        return ", ".join(f"{role}: {number}" for role, number in _numbers_of(opened.command).items())
    return "restarted"


def _with_command(
    cluster: Cluster, at_work: frozenset[str] = frozenset(), todo: tuple[str, ...] = (), *, is_waiting: bool = False
) -> Cluster:
    assert cluster.open_command is not None
    command = replace(cluster.open_command, at_work=at_work, todo=todo, is_waiting=is_waiting)
    return replace(cluster, open_command=command)


def _close(cluster: Cluster, line: str, outcome: Outcome = Outcome.DONE) -> Step:
    assert cluster.open_command is not None
    return replace(cluster, open_command=None), [events.CommandAnswer(cluster.open_command.number, line, outcome)]


def _refusal(cluster: Cluster, command: OperatorCommand) -> str | None:
    if cluster.phase is not ClusterPhase.SERVING:
        return f"the cluster is {cluster.phase}; commands are accepted while it is {ClusterPhase.SERVING}"
    if cluster.open_command is not None:
        return "another command is in progress; try again when it has finished"
    match command:
        case DrainCommand(replica=name):
            return _why_not_running(cluster, name) or _why_needed(cluster, name)
        case ResumeCommand(replica=name):
            return _why_not_running(cluster, name)
        case RestartCommand():
            names = command.replicas or _running(cluster)
            reasons = [_why_not_running(cluster, name) for name in names]
            if command.is_rolling and not any(reasons):
                reasons = [_why_needed(cluster, name) for name in names]
            return next(filter(None, reasons), None)
        case ScaleCommand():
            return _scale_refusal(cluster, command)
        case StatusCommand():
            return None


def _difference(cluster: Cluster, command: ScaleCommand) -> tuple[list[str], list[str]]:
    missing, extra = list[str](), list[str]()
    for role, number in _numbers_of(command).items():
        desired = [str(replica_id(role, index)) for index in range(number)]
        there = [name for name in _replicas(cluster, role) if cluster.members[name].is_desired]
        missing += [name for name in desired if name not in there]
        extra += [name for name in there if name not in desired]
    return missing, extra


def _numbers_of(command: ScaleCommand) -> dict[Role, int]:
    given = {Role.PREFILL: command.prefill, Role.DECODE: command.decode}
    return {role: number for role, number in given.items() if number is not None}


def _running(cluster: Cluster) -> tuple[str, ...]:
    return tuple(name for name in _replicas(cluster, *Role) if cluster.members[name].state is MemberState.RUNNING)


def _why_not_running(cluster: Cluster, name: str) -> str | None:
    if name not in (names := _replicas(cluster, *Role)):
        return f"replica: got {name!r}; allowed: {', '.join(names)}"
    state = cluster.members[name].state
    return None if state is MemberState.RUNNING else f"{name}: the replica is {state}; allowed: a running replica"


def _why_needed(cluster: Cluster, name: str) -> str | None:
    role = role_of(ReplicaId(name))
    if _is_served(cluster, role, without=[name]):
        return None
    more = len(_replicas(cluster, role)) + 1
    return f"{name}: no other {role} replica takes requests; `baton scale {role}={more}` adds one"


def _scale_refusal(cluster: Cluster, command: ScaleCommand) -> str | None:
    numbers = _numbers_of(command)
    if not numbers or not all(1 <= number <= MOST_REPLICAS for number in numbers.values()):
        given = ", ".join(f"{role}={number}" for role, number in numbers.items()) or "nothing"
        return f"scale: got {given}; allowed: prefill and decode from 1 to {MOST_REPLICAS}"
    _, extra = _difference(cluster, command)
    for role in numbers:
        leaving = [name for name in extra if role_of(ReplicaId(name)) is role]
        if leaving and not _is_served(cluster, role, without=leaving):
            names = ", ".join(leaving)
            return f"scale: this would leave no {role} replica that takes requests; to be removed: {names}"
    return None


def _is_served(cluster: Cluster, role: Role, without: Collection[str]) -> bool:
    silent = {member.name for member, _ in cluster.silences()}
    others = [cluster.members[name] for name in _replicas(cluster, role) if name not in {*without, *silent}]
    return any(
        member.state is MemberState.RUNNING and (member.name, member.incarnation) not in cluster.draining
        for member in others
    )


def _replicas(cluster: Cluster, *roles: Role) -> list[str]:
    return [
        name
        for role in roles
        for name, member in cluster.members.items()
        if name.startswith(f"{role}-") and member.state is not MemberState.REMOVED
    ]
