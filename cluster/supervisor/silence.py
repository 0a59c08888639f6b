"""Detection of silent members. A process that hangs, or whose machine is lost, does not report its end.

The rank table shows the replicas. The bootstrap service and the routers are checked directly.
"""

from collections.abc import Sequence
from dataclasses import replace

from cluster.launch.services import BOOTSTRAP
from cluster.spec.ids import is_router
from cluster.supervisor import events
from cluster.supervisor.events import Action
from cluster.supervisor.state import Cluster, Member, MemberState, Now, Silence

MAX_LATE_S = 1.0
"""Maximum delay of a check. A longer delay means that the driver itself was suspended."""


def restart_after_suspension(cluster: Cluster, now: Now) -> tuple[Cluster, list[Action]]:
    """Restart all silences if the driver itself was suspended since the previous event."""
    due_s, looked = cluster.next_look_s(), replace(cluster, looked_s=now.s)
    if due_s is None or now.s <= due_s + MAX_LATE_S:
        return looked, []
    line = f"the driver was suspended for {now.s - due_s:.1f} s: silence counts from now on"
    silent = {name: replace(silence, since_s=now.s) for name, silence in cluster.silent.items()}
    return replace(looked, silent=silent), [events.Report(line)]


def on_table_seen(cluster: Cluster, event: events.TableSeen, now: Now) -> Cluster:
    """Mark the running replicas that are not ready as silent."""
    silent = {
        member.name: _silence(cluster, member, _reason(event.silent.get(member.name, ())), now)
        for member in cluster.members.values()
        if member.state in (MemberState.RUNNING, MemberState.DRAINING)
        and member.name.startswith(("prefill-", "decode-"))
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
    """Return the silence of a service if it is running."""
    member = cluster.members[name]
    is_running = member.state is MemberState.RUNNING
    return {name: _silence(cluster, member, "it does not respond", now)} if is_running else {}


def _routers_of(cluster: Cluster) -> dict[str, Silence]:
    return {name: silence for name, silence in cluster.silent.items() if is_router(name)}


def _silence(cluster: Cluster, member: Member, reason: str, now: Now) -> Silence:
    known = cluster.silent.get(member.name)
    since_s = known.since_s if known is not None and known.incarnation == member.incarnation else now.s
    return Silence(member.incarnation, since_s, reason)


def _reason(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))} has sent no heartbeat" if ranks else "it is not in the rank table"
