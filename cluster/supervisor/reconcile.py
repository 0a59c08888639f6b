"""Rules of the supervisor, with one pure function per event. The types are in state.py.

A process that hangs, or whose machine is lost, does not report its end, but falls silent; silence.py has the rules.
Before a silent member is ended, the actor system is asked about its processes: if it does not answer either, the fault
may be nearer to the driver.
"""

from dataclasses import replace

from cluster.launch.services import BOOTSTRAP
from cluster.spec.errors import PeerLostError, SystemLostError
from cluster.spec.ids import Incarnation
from cluster.supervisor import events
from cluster.supervisor.events import Action, Event
from cluster.supervisor.operate import (
    Step,
    advance,
    failures_of,
    on_command,
    on_placed,
    on_replica_drained,
    on_replica_resumed,
)
from cluster.supervisor.silence import (
    examine_overdue,
    on_router_seen,
    on_table_answered,
    on_table_lost,
    on_table_seen,
    restart_after_suspension,
    with_silence,
)
from cluster.supervisor.state import MAX_BACKOFF_S, NEVER, STABLE_S, Cluster, ClusterPhase, MemberState, Now

RESTART_BACKOFF_S = 1.0
"""Wait before the first restart of a failed replica. It is short because one restart is often enough."""


def next_incarnation(previous: Incarnation, unix_ms: int) -> Incarnation:
    """Return an incarnation above the previous one and above those of earlier clusters with the same name."""
    return Incarnation(max(previous + 1, unix_ms))


def backoff_s(first_s: float, num_failures: int) -> float:
    """Return the wait after a number of consecutive failures. It doubles up to ``MAX_BACKOFF_S``."""
    return float(min(MAX_BACKOFF_S, first_s * 2.0 ** min(num_failures - 1, 16)))


def reconcile(cluster: Cluster, event: Event, now: Now) -> Step:
    """Return the state after an event and the actions to take. An event from an earlier incarnation changes nothing."""
    cluster, reports = restart_after_suspension(cluster, now)
    cluster, actions = _react(cluster, event, now)
    cluster, examinations = examine_overdue(cluster, now)
    cluster, more = advance(cluster, event)
    return cluster, [*reports, *actions, *examinations, *more]


def _react(cluster: Cluster, event: Event, now: Now) -> Step:
    match event:
        case events.Tick():
            return _on_tick(cluster, now)
        case events.Started():
            return _on_started(cluster, event, now)
        case events.Failed():
            return _on_failed(cluster, event, now)
        case events.Ended():
            return _on_ended(cluster, event, now)
        case events.Proven():
            return _on_proven(cluster, event)
        case events.StopRequested():
            return _on_stop_requested(cluster, event)
        case events.ClusterDrained():
            return _on_drained(cluster, event)
        case events.Stopped():
            # An orderly stop and a kill may both finish.
            is_new = cluster.phase is not ClusterPhase.STOPPED
            return cluster.moved(ClusterPhase.STOPPED, "Stopped") if is_new else cluster, []
        case events.TableSeen():
            return on_table_seen(on_table_answered(cluster, now), event, now), []
        case events.TableUnchanged():
            return on_table_answered(cluster, now), []
        case events.TableLost():
            return on_table_lost(cluster, now), []
        case events.RouterSeen():
            return on_router_seen(cluster, event, now), []
        case events.Examined():
            return _on_examined(cluster, event, now)
        case events.SystemLost():
            return _on_system_lost(cluster, event)
        case events.CommandReceived():
            return on_command(cluster, event, now)
        case events.Placed():
            return on_placed(cluster, event, now)
        case events.ReplicaDrained():
            return on_replica_drained(cluster, event)
        case events.ReplicaResumed():
            return on_replica_resumed(cluster, event)


def _on_tick(cluster: Cluster, now: Now) -> Step:
    actions: list[Action] = []
    if cluster.phase not in (ClusterPhase.STARTING, ClusterPhase.SERVING):
        return cluster, actions
    for member in cluster.members.values():
        if member.state is MemberState.WAITING and member.wake_s <= now.s:
            incarnation = next_incarnation(member.incarnation, now.unix_ms)
            starting = replace(member.moved(MemberState.STARTING, "tick"), incarnation=incarnation)
            cluster = cluster.with_member(starting)
            actions.append(events.Start(member.name, incarnation))
    return cluster, actions


def _on_started(cluster: Cluster, event: events.Started, now: Now) -> Step:
    member = cluster.addressed(event.name, event.incarnation, MemberState.STARTING)
    if member is None:
        return cluster, []
    running = replace(member.moved(MemberState.RUNNING, "started"), running_since_s=now.s)
    cluster = cluster.with_member(running)
    actions: list[Action] = []
    if event.name == BOOTSTRAP:  # a new table has no record of ended incarnations
        actions += [events.MarkEnded(name, incarnation, True) for name, incarnation in cluster.reaped.items()]
        actions += [events.MarkEnded(name, max(starts), False) for name, starts in cluster.unproven.items() if starts]
    if cluster.phase is ClusterPhase.SERVING:
        actions.append(events.Report(f"{event.name}: running, incarnation {event.incarnation}"))
    elif cluster.phase is ClusterPhase.STARTING and all(
        member.state is MemberState.RUNNING for member in cluster.members.values()
    ):
        cluster = cluster.moved(ClusterPhase.SERVING, type(event).__name__)
        actions.append(events.Announce())
    return cluster, actions


def _on_failed(cluster: Cluster, event: events.Failed, now: Now) -> Step:
    living = (MemberState.STARTING, MemberState.RUNNING, MemberState.DRAINING)
    member = cluster.addressed(event.name, event.incarnation, *living)
    if member is None or cluster.phase not in (ClusterPhase.STARTING, ClusterPhase.SERVING):
        return cluster, []
    if cluster.phase is ClusterPhase.STARTING:
        return replace(cluster.moved(ClusterPhase.STOPPING, type(event).__name__), failure=event.error), [events.Stop()]
    was_stable = member.state is not MemberState.STARTING and now.s - member.running_since_s >= STABLE_S
    num_failures = 1 if was_stable else member.num_failures + 1
    first_error = str(event.error) if num_failures == 1 else member.first_error
    ending = replace(member.moved(MemberState.ENDING, "failed"), num_failures=num_failures, first_error=first_error)
    cluster = replace(cluster, silent={name: s for name, s in cluster.silent.items() if name != event.name})
    line = f"{event.name}: failed, incarnation {event.incarnation}: {event.error} (baton logs {event.name})"
    return cluster.with_member(ending), [events.Report(line), events.End(event.name, event.incarnation)]


def _on_ended(cluster: Cluster, event: events.Ended, now: Now) -> Step:
    member = cluster.addressed(event.name, event.incarnation, MemberState.ENDING)
    if member is None:
        return cluster, []
    wait_s = backoff_s(cluster.backoff_s, member.num_failures) if member.num_failures else 0.0
    target = MemberState.WAITING if member.is_desired else MemberState.REMOVED
    cluster = cluster.with_member(replace(member.moved(target, "ended"), wake_s=now.s + wait_s))
    actions: list[Action] = []
    if event.name == BOOTSTRAP:
        pass  # no process needs proof that the previous service's table is gone
    elif event.proven:
        proven = {**cluster.proven, event.name: event.incarnation}
        cluster, actions = _reap(replace(cluster, proven=proven), event.name)
    else:
        unproven = cluster.unproven.get(event.name, frozenset()) | {event.incarnation}
        cluster = replace(cluster, unproven={**cluster.unproven, event.name: unproven})
        actions = [events.Prove(event.name, event.incarnation)]
    if cluster.phase is ClusterPhase.SERVING:
        times = failures_of(member) if member.num_failures > 1 else ""
        line = f"restarts in {wait_s:g} s{times}" if member.is_desired else "removed"
        actions.append(events.Report(f"{event.name}: {line}"))
    return cluster, actions


def _on_proven(cluster: Cluster, event: events.Proven) -> Step:
    unproven = cluster.unproven.get(event.name, frozenset()) - {event.incarnation}
    proven = Incarnation(max(event.incarnation, cluster.proven.get(event.name, NEVER)))
    cluster = replace(
        cluster,
        unproven={**cluster.unproven, event.name: unproven},
        proven={**cluster.proven, event.name: proven},
    )
    return _reap(cluster, event.name)


def _reap(cluster: Cluster, name: str) -> Step:
    """Mark the highest confirmed incarnation as ended. This covers all earlier ones, so each must be confirmed dead."""
    proven = cluster.proven[name]
    if proven <= cluster.reaped.get(name, NEVER) or any(
        incarnation < proven for incarnation in cluster.unproven.get(name, ())
    ):
        return cluster, []
    return replace(cluster, reaped={**cluster.reaped, name: proven}), [events.MarkEnded(name, proven, True)]


def _on_stop_requested(cluster: Cluster, event: events.StopRequested) -> Step:
    match cluster.phase:
        case ClusterPhase.STARTING:
            line = f"{event.reason}: stopping"
            return cluster.moved(ClusterPhase.STOPPING, type(event).__name__), [events.Report(line), events.Stop()]
        case ClusterPhase.SERVING:
            line = f"{event.reason}: draining; repeat to stop immediately"
            draining = cluster.moved(ClusterPhase.DRAINING, type(event).__name__)
            return draining, [events.Report(line), events.DrainCluster()]
        case ClusterPhase.DRAINING | ClusterPhase.STOPPING:
            line = f"{event.reason}: stopping immediately"
            return cluster.moved(ClusterPhase.KILLING, type(event).__name__), [events.Report(line), events.Kill()]
        case ClusterPhase.KILLING | ClusterPhase.STOPPED:
            return cluster, []


def _on_drained(cluster: Cluster, event: events.ClusterDrained) -> Step:
    if cluster.phase is not ClusterPhase.DRAINING:
        return cluster, []  # a second request to stop has ended the wait
    line = "drained: stopping" if event.complete else "some open requests have not ended; stopping anyway"
    return cluster.moved(ClusterPhase.STOPPING, type(event).__name__), [events.Report(line), events.Stop()]


def _on_examined(cluster: Cluster, event: events.Examined, now: Now) -> Step:
    """End a member that is still silent, unless the actor system does not answer either: then wait once more."""
    silence = cluster.silent.get(event.name)
    if silence is None or silence.incarnation != event.incarnation or not silence.is_examined:
        return cluster, []
    if event.lives is None:
        line = f"{event.name}: {silence.reason}, but Ray does not answer either; waiting once more"
        waiting = replace(silence, since_s=now.s, is_examined=False)
        return with_silence(cluster, event.name, waiting), [events.Report(line)]
    state = "its processes are alive" if event.lives else "a process of it has died"
    error = PeerLostError(f"{silence.reason} for longer than resources.silence_s allows; {state}")
    return _on_failed(cluster, events.Failed(event.name, event.incarnation, error), now)


def _on_system_lost(cluster: Cluster, event: events.SystemLost) -> Step:
    if cluster.phase in (ClusterPhase.KILLING, ClusterPhase.STOPPED):
        return cluster, []
    failed = replace(cluster.moved(ClusterPhase.KILLING, type(event).__name__), failure=SystemLostError(event.reason))
    return failed, [events.Kill()]
