"""Rules of the supervisor, with one pure function per event. The types are in state.py.

A process that hangs, or whose machine is lost, does not report its end. The rank table shows which replicas are
silent. The bootstrap service and the routers are checked directly.
"""

from collections.abc import Sequence
from dataclasses import replace

from cluster.launch.services import BOOTSTRAP
from cluster.spec.errors import PeerLostError
from cluster.spec.ids import Incarnation, is_router
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
from cluster.supervisor.state import MAX_BACKOFF_S, NEVER, STABLE_S, Cluster, Member, MemberState, Now, Phase, Silence

RESTART_BACKOFF_S = 1.0
"""Wait before the first restart of a failed replica. It is short because one restart is often enough."""
MAX_LATE_S = 1.0
"""Maximum delay of a check. A longer delay means that the driver itself was suspended."""


def next_incarnation(previous: Incarnation, unix_ms: int) -> Incarnation:
    """Return an incarnation above the previous one and above those of earlier clusters with the same name."""
    return Incarnation(max(previous + 1, unix_ms))


def backoff_s(first_s: float, num_failures: int) -> float:
    """Return the wait after a number of consecutive failures. It doubles up to ``MAX_BACKOFF_S``."""
    return float(min(MAX_BACKOFF_S, first_s * 2.0 ** min(num_failures - 1, 16)))


def reconcile(cluster: Cluster, event: Event, now: Now) -> Step:
    """Return the state after an event and the actions to take. An event from an earlier incarnation changes nothing."""
    cluster, reports = _restart_after_suspension(cluster, now)
    cluster, actions = _react(cluster, event, now)
    cluster, more = advance(cluster, event)
    return cluster, [*reports, *actions, *more]


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
        case events.Drained():
            return _on_drained(cluster, event)
        case events.Stopped():
            # An orderly stop and a kill may both finish.
            is_new = cluster.phase is not Phase.STOPPED
            return cluster.moved(Phase.STOPPED, "Stopped") if is_new else cluster, []
        case events.TableSeen():
            return _on_table_seen(cluster, event, now), []
        case events.TableLost():
            return _on_table_lost(cluster, now), []
        case events.RouterSeen():
            return _on_router_seen(cluster, event, now), []
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
    wake_s = cluster.next_wake_s()
    if wake_s is None or wake_s > now.s:
        return cluster, actions
    for member, silence in cluster.silences():
        if now.s >= silence.since_s + cluster.patience_s:
            error = PeerLostError(f"{silence.reason} for longer than resources.silence_s allows")
            cluster, more = _on_failed(cluster, events.Failed(member.name, member.incarnation, error), now)
            actions += more
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
    if cluster.phase is Phase.SERVING:
        actions.append(events.Report(f"{event.name}: running, incarnation {event.incarnation}"))
    elif cluster.phase is Phase.STARTING and all(
        member.state is MemberState.RUNNING for member in cluster.members.values()
    ):
        cluster = cluster.moved(Phase.SERVING, type(event).__name__)
        actions.append(events.Announce())
    return cluster, actions


def _on_failed(cluster: Cluster, event: events.Failed, now: Now) -> Step:
    living = (MemberState.STARTING, MemberState.RUNNING, MemberState.DRAINING)
    member = cluster.addressed(event.name, event.incarnation, *living)
    if member is None or cluster.phase not in (Phase.STARTING, Phase.SERVING):
        return cluster, []
    if cluster.phase is Phase.STARTING:
        return replace(cluster.moved(Phase.STOPPING, type(event).__name__), failure=event.error), [events.Stop()]
    was_stable = member.state is not MemberState.STARTING and now.s - member.running_since_s >= STABLE_S
    num_failures = 1 if was_stable else member.num_failures + 1
    first_error = str(event.error) if num_failures == 1 else member.first_error
    ending = replace(member.moved(MemberState.ENDING, "failed"), num_failures=num_failures, first_error=first_error)
    cluster = replace(cluster, silent={name: s for name, s in cluster.silent.items() if name != event.name})
    line = f"{event.name}: failed, incarnation {event.incarnation}: {event.error}"
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
    if cluster.phase is Phase.SERVING:
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
        case Phase.STARTING:
            line = f"{event.reason}: stopping"
            return cluster.moved(Phase.STOPPING, type(event).__name__), [events.Report(line), events.Stop()]
        case Phase.SERVING:
            line = f"{event.reason}: draining; repeat to stop immediately"
            return cluster.moved(Phase.DRAINING, type(event).__name__), [events.Report(line), events.Drain()]
        case Phase.DRAINING | Phase.STOPPING:
            line = f"{event.reason}: stopping immediately"
            return cluster.moved(Phase.KILLING, type(event).__name__), [events.Report(line), events.Kill()]
        case Phase.KILLING | Phase.STOPPED:
            return cluster, []


def _on_drained(cluster: Cluster, event: events.Drained) -> Step:
    if cluster.phase is not Phase.DRAINING:
        return cluster, []  # a second request to stop has ended the wait
    line = "drained: stopping" if event.complete else "some open requests have not ended; stopping anyway"
    return cluster.moved(Phase.STOPPING, type(event).__name__), [events.Report(line), events.Stop()]


def _restart_after_suspension(cluster: Cluster, now: Now) -> tuple[Cluster, list[Action]]:
    """Restart every member's silence timer if the driver itself was suspended since the previous event."""
    due_s, looked = cluster.next_look_s(), replace(cluster, looked_s=now.s)
    if due_s is None or now.s <= due_s + MAX_LATE_S:
        return looked, []
    line = f"the driver was suspended for {now.s - due_s:.1f} s; the silence timers of all processes restart now"
    silent = {name: replace(silence, since_s=now.s) for name, silence in cluster.silent.items()}
    return replace(looked, silent=silent), [events.Report(line)]


def _on_table_seen(cluster: Cluster, event: events.TableSeen, now: Now) -> Cluster:
    """Mark the running replicas that are not ready as silent."""
    silent = {
        member.name: _silence(cluster, member, _reason(event.silent.get(member.name, ())), now)
        for member in cluster.members.values()
        if member.state in (MemberState.RUNNING, MemberState.DRAINING)
        and member.name.startswith(("prefill-", "decode-"))
        and (member.name, member.incarnation) not in event.ready
    }
    return replace(cluster, silent={**_routers_of(cluster), **silent}, draining=event.draining)


def _on_table_lost(cluster: Cluster, now: Now) -> Cluster:
    """Mark the bootstrap service as silent. Nothing is known about the replicas."""
    return replace(cluster, silent={**_routers_of(cluster), **_unanswered(cluster, BOOTSTRAP, now)})


def _on_router_seen(cluster: Cluster, event: events.RouterSeen, now: Now) -> Cluster:
    others = {name: silence for name, silence in cluster.silent.items() if name != event.name}
    return replace(cluster, silent=others if event.responds else {**others, **_unanswered(cluster, event.name, now)})


def _unanswered(cluster: Cluster, name: str, now: Now) -> dict[str, Silence]:
    member = cluster.members[name]
    is_running = member.state is MemberState.RUNNING
    return {name: _silence(cluster, member, "no response", now)} if is_running else {}


def _routers_of(cluster: Cluster) -> dict[str, Silence]:
    return {name: silence for name, silence in cluster.silent.items() if is_router(name)}


def _silence(cluster: Cluster, member: Member, reason: str, now: Now) -> Silence:
    known = cluster.silent.get(member.name)
    since_s = known.since_s if known is not None and known.incarnation == member.incarnation else now.s
    return Silence(member.incarnation, since_s, reason)


def _reason(ranks: Sequence[int]) -> str:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"no heartbeat from {names}" if ranks else "missing from the rank table"
