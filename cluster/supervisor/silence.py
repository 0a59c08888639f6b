"""Silence of members, with pure functions that reconcile.py calls.

The rank table shows which replicas are silent. The bootstrap service and the routers are checked directly. Silence
counts only while the driver can hear: not while it is suspended itself, nor, for replicas, while the bootstrap service
does not answer.
"""

from collections.abc import Sequence
from dataclasses import replace

from cluster.launch.services import BOOTSTRAP
from cluster.spec.ids import is_replica, is_router
from cluster.supervisor import events
from cluster.supervisor.events import Action
from cluster.supervisor.state import Cluster, Member, MemberState, Now, Silence

MAX_LATE_S = 1.0
"""Maximum delay of a check. A longer delay means that the driver itself was suspended."""
ANSWER_S = 2.0
"""Maximum time between two prompt answers of the bootstrap service, which is asked every second."""


def examine_overdue(cluster: Cluster, now: Now) -> tuple[Cluster, list[Action]]:
    """Ask about the processes of members that have been silent for too long."""
    actions: list[Action] = []
    for member, silence in cluster.silences():
        heard_s = cluster.answered_s if is_replica(member.name) else now.s
        if heard_s >= silence.since_s + cluster.patience_s and not silence.is_examined:
            cluster = with_silence(cluster, member.name, replace(silence, is_examined=True))
            actions.append(events.Examine(member.name, member.incarnation))
    return cluster, actions


def restart_after_suspension(cluster: Cluster, now: Now) -> tuple[Cluster, list[Action]]:
    """Restart every member's silence timer if the driver itself was suspended since the previous event."""
    due_s, looked = cluster.next_look_s(), replace(cluster, looked_s=now.s)
    if due_s is None or now.s <= due_s + MAX_LATE_S:
        return looked, []
    line = f"the driver was suspended for {now.s - due_s:.1f} s; the silence timers of all processes restart now"
    silent = {name: replace(silence, since_s=now.s, is_examined=False) for name, silence in cluster.silent.items()}
    return replace(looked, silent=silent), [events.Report(line)]


def on_table_answered(cluster: Cluster, now: Now) -> Cluster:
    """Record an answer of the bootstrap service. If it is late, the replicas' silence does not count the delay."""
    late_s = max(0.0, now.s - cluster.answered_s - ANSWER_S)
    silent = {
        name: replace(silence, since_s=min(silence.since_s + late_s, now.s)) if is_replica(name) else silence
        for name, silence in cluster.silent.items()
    }
    return replace(cluster, silent=silent, answered_s=now.s)


def on_table_seen(cluster: Cluster, event: events.TableSeen, now: Now) -> Cluster:
    """Mark the running replicas that are not ready as silent."""
    silent = {
        member.name: _silence(cluster, member, _reason(event.silent.get(member.name, ())), now)
        for member in cluster.members.values()
        if member.state in (MemberState.RUNNING, MemberState.DRAINING)
        and is_replica(member.name)
        and (member.name, member.incarnation) not in event.ready
    }
    return replace(cluster, silent={**_routers_of(cluster), **silent}, draining=event.draining)


def on_table_lost(cluster: Cluster, now: Now) -> Cluster:
    """Mark the bootstrap service as silent. Nothing is known about the replicas."""
    return replace(cluster, silent={**_routers_of(cluster), **_unanswered(cluster, BOOTSTRAP, now)})


def on_router_seen(cluster: Cluster, event: events.RouterSeen, now: Now) -> Cluster:
    others = {name: silence for name, silence in cluster.silent.items() if name != event.name}
    return replace(cluster, silent=others if event.responds else {**others, **_unanswered(cluster, event.name, now)})


def _unanswered(cluster: Cluster, name: str, now: Now) -> dict[str, Silence]:
    member = cluster.members[name]
    is_running = member.state is MemberState.RUNNING
    return {name: _silence(cluster, member, "no response", now)} if is_running else {}


def _routers_of(cluster: Cluster) -> dict[str, Silence]:
    return {name: silence for name, silence in cluster.silent.items() if is_router(name)}


def with_silence(cluster: Cluster, name: str, silence: Silence) -> Cluster:
    return replace(cluster, silent={**cluster.silent, name: silence})


def _silence(cluster: Cluster, member: Member, reason: str, now: Now) -> Silence:
    known = cluster.silent.get(member.name)
    if known is not None and known.incarnation == member.incarnation:
        return replace(known, reason=reason)
    return Silence(member.incarnation, now.s, reason)


def _reason(ranks: Sequence[int]) -> str:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"no heartbeat from {names}" if ranks else "missing from the rank table"
