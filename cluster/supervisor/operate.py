"""Execution of operator commands: pure, as the rest of `reconcile`; one at a time, and each comes to an end.

A replica that a command removes or restarts is drained first, within the grace period. Any failure on the way ends the
command with an error; the supervisor still restores every wanted replica.
"""

from dataclasses import replace

from cluster.supervisor import events as words
from cluster.supervisor.events import Action, Event, Outcome
from cluster.supervisor.order_checks import difference, numbers_of, refusal, running, why_needed, why_not_running
from cluster.supervisor.orders import DrainOrder, RestartOrder, ResumeOrder, ScaleOrder, TellOrder
from cluster.supervisor.state import Cluster, Member, MemberState, Now, OpenOrder, Phase

Step = tuple[Cluster, list[Action]]


def on_ordered(cluster: Cluster, event: words.Ordered, now: Now) -> Step:
    """Refuse a command, or start it."""
    if isinstance(event.order, TellOrder):
        return cluster, [words.Answer(event.number, "\n".join(_troubles(cluster)), Outcome.DONE)]
    if reason := refusal(cluster, event.order):
        return cluster, [words.Answer(event.number, reason, Outcome.REFUSED)]
    opened = replace(cluster, order=OpenOrder(number=event.number, order=event.order))
    match event.order:
        case DrainOrder(replica=name):
            drain = _drain(opened, cluster.members[name])
            return _with_order(opened, at_work=frozenset({name}), is_waiting=True), [drain]
        case ResumeOrder(replica=name):
            resume = words.ResumeReplica(name, cluster.members[name].incarnation)
            return _with_order(opened, at_work=frozenset({name}), is_waiting=True), [resume]
        case RestartOrder():
            names = tuple(dict.fromkeys(event.order.replicas)) or running(cluster)
            return _with_order(opened, todo=names), []
        case ScaleOrder():
            missing, _ = difference(cluster, event.order)
            if missing:
                return _with_order(opened, is_waiting=True), [words.Place(missing)]
            return _rescale(opened, event.order, now)


def _troubles(cluster: Cluster) -> list[str]:
    return [
        f"{member.name}: {member.state}{failures_of(member)}"
        for member in cluster.members.values()
        if member.state not in (MemberState.RUNNING, MemberState.REMOVED)
    ]


def failures_of(member: Member) -> str:
    """Return the end of a line about a member: consecutive failures, and the first error."""
    if not member.num_failures:
        return ""
    times = "once" if member.num_failures == 1 else f"{member.num_failures} times in a row"
    return f"; failed {times}, at first: {member.first_error}"


def on_placed(cluster: Cluster, event: words.Placed, now: Now) -> Step:
    """Continue the command with new replicas placed, or end it without a change."""
    order = cluster.order
    if order is None or not isinstance(order.order, ScaleOrder) or not order.is_waiting:
        return cluster, []
    if event.refusal is not None:
        return _close(cluster, str(event.refusal), Outcome.REFUSED)
    return _rescale(_with_order(cluster), order.order, now)


def on_replica_drained(cluster: Cluster, event: words.ReplicaDrained) -> Step:
    """Continue after a replica has drained or its time ran out."""
    member = cluster.addressed(event.name, event.incarnation, MemberState.RUNNING, MemberState.DRAINING)
    order = cluster.order
    if member is None:
        return cluster, []
    late = [] if event.complete else [words.Report(f"{event.name}: some open requests did not end in time")]
    if member.state is MemberState.DRAINING:
        ending = replace(member.moved(MemberState.ENDING, "drained"), num_failures=0)
        return cluster.with_member(ending), [*late, words.End(event.name, event.incarnation)]
    if order is None or not isinstance(order.order, DrainOrder) or order.order.replica != event.name:
        return cluster, []
    if event.complete:
        return _close(cluster, f"{event.name}: drained")
    reason = f"{event.name}: some open requests did not end in time; it takes no new ones"
    return _close(cluster, reason, Outcome.FAILED)


def on_replica_resumed(cluster: Cluster, event: words.ReplicaResumed) -> Step:
    """Continue after a replica takes requests again, or did not confirm it."""
    order = cluster.order
    is_running = cluster.addressed(event.name, event.incarnation, MemberState.RUNNING) is not None
    if order is None or not isinstance(order.order, ResumeOrder) or order.order.replica != event.name or not is_running:
        return cluster, []
    if event.complete:
        return _close(cluster, f"{event.name}: takes requests again")
    return _close(cluster, f"{event.name}: did not confirm that it takes requests again", Outcome.FAILED)


def advance(cluster: Cluster, event: Event) -> Step:
    """End unwanted members and continue the open command, after each event."""
    if cluster.phase is not Phase.SERVING:
        return (cluster, []) if cluster.order is None else _close(cluster, "the cluster stops", Outcome.FAILED)
    cluster, actions = _let_go(cluster)
    order = cluster.order
    if order is None:
        return cluster, actions
    if name := _failed_with(cluster, order, event):
        left = f"; not restarted: {', '.join(order.todo)}" if order.todo else ""
        why = event.error if isinstance(event, words.Failed) else cluster.members[name].first_error
        line = f"{name}: failed, and is started again: {why}{left}"
        cluster, more = _close(cluster, line, Outcome.FAILED)
    elif order.is_waiting or not all(_is_settled(cluster.members[name]) for name in order.at_work):
        more = []
    else:
        cluster, more = _next_turn(cluster, order) if order.todo else _close(cluster, _summary(order))
    return cluster, [*actions, *more]


def _let_go(cluster: Cluster) -> Step:
    actions: list[Action] = []
    for member in list(cluster.members.values()):
        if member.state is MemberState.RUNNING and not member.is_wanted:
            cluster, begun = _begin(cluster, member.name)
            actions += begun
    return cluster, actions


def _next_turn(cluster: Cluster, order: OpenOrder) -> Step:
    """Restart the next replica, or all of them."""
    assert isinstance(order.order, RestartOrder)
    number = 1 if order.order.is_rolling else len(order.todo)
    names, todo = order.todo[:number], order.todo[number:]
    for name in names:
        reason = why_not_running(cluster, name) or (order.order.is_rolling and why_needed(cluster, name))
        if reason:
            return _close(cluster, f"{reason}; not restarted: {', '.join(order.todo)}", Outcome.FAILED)
    cluster = _with_order(cluster, at_work=frozenset(names), todo=todo)
    actions: list[Action] = []
    for name in names:
        cluster, begun = _begin(cluster, name)
        actions += [*begun, words.Answer(order.number, f"{name}: restarting", Outcome.GOING_ON)]
    return cluster, actions


def _rescale(cluster: Cluster, order: ScaleOrder, now: Now) -> Step:
    """Add missing replicas and drain surplus ones; ``advance`` completes the command."""
    missing, extra = difference(cluster, order)
    for name in missing:
        member = cluster.members.get(name, Member(name=name))
        if member.state is MemberState.REMOVED:
            member = replace(member.moved(MemberState.WAITING, "scale"), num_failures=0)
        cluster = cluster.with_member(replace(member, wake_s=now.s, is_wanted=True))
    for name in extra:
        member = replace(cluster.members[name], is_wanted=False)
        if member.state is MemberState.WAITING:
            member = member.moved(MemberState.REMOVED, "scale")
        cluster = cluster.with_member(member)
    return _with_order(cluster, at_work=frozenset([*missing, *extra])), []


def _begin(cluster: Cluster, name: str) -> Step:
    """Drain a replica, as the first step to its end."""
    member = cluster.members[name].moved(MemberState.DRAINING, "order")
    return cluster.with_member(member), [words.Report(f"{name}: draining"), _drain(cluster, member)]


def _drain(cluster: Cluster, member: Member) -> words.DrainReplica:
    order = cluster.order.order if cluster.order is not None else None
    grace_s = None if order is None or isinstance(order, ResumeOrder | TellOrder) else order.grace_s
    return words.DrainReplica(member.name, member.incarnation, grace_s)


def _failed_with(cluster: Cluster, order: OpenOrder, event: Event) -> str | None:
    """Return the replica of a command that this event made fail: by itself, or by its silence at a Tick."""
    names = {event.name} & order.at_work if isinstance(event, words.Failed) else order.at_work
    is_due = isinstance(event, words.Failed | words.Tick)
    return next((name for name in sorted(names) if is_due and _has_failed(cluster, name)), None)


def _has_failed(cluster: Cluster, name: str) -> bool:
    """Return whether a wanted replica is being ended because of its own failure."""
    member = cluster.members[name]
    return member.state is MemberState.ENDING and member.num_failures > 0 and member.is_wanted


def _is_settled(member: Member) -> bool:
    return member.state is (MemberState.RUNNING if member.is_wanted else MemberState.REMOVED)


def _summary(order: OpenOrder) -> str:
    match order.order:
        case ScaleOrder():
            return ", ".join(f"{role}: {number}" for role, number in numbers_of(order.order).items())
        case _:
            return "restarted"


def _with_order(
    cluster: Cluster, at_work: frozenset[str] = frozenset(), todo: tuple[str, ...] = (), *, is_waiting: bool = False
) -> Cluster:
    assert cluster.order is not None
    order = replace(cluster.order, at_work=at_work, todo=todo, is_waiting=is_waiting)
    return replace(cluster, order=order)


def _close(cluster: Cluster, line: str, outcome: Outcome = Outcome.DONE) -> Step:
    assert cluster.order is not None
    return replace(cluster, order=None), [words.Answer(cluster.order.number, line, outcome)]
