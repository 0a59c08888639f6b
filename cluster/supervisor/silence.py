"""Detection of silent members: a process that hangs, or whose machine is lost, does not report its end.

The rank table shows replicas; bootstrap service and router are checked directly.
"""

from collections.abc import Sequence
from dataclasses import replace

from cluster.launch.services import BOOTSTRAP
from cluster.spec.ids import is_router
from cluster.supervisor import events as words
from cluster.supervisor.events import Action
from cluster.supervisor.state import Cluster, Member, MemberState, Now, Silence

MAX_LATE_S = 1.0
"""Maximum delay of a check. A later one means that the driver itself was suspended, and proves nothing."""


def on_look(cluster: Cluster, now: Now) -> tuple[Cluster, list[Action]]:
    """Restart all silences if the driver itself was suspended. Called before each event."""
    due_s, looked = cluster.next_look_s(), replace(cluster, looked_s=now.s)
    if due_s is None or now.s <= due_s + MAX_LATE_S:
        return looked, []
    line = f"the driver was suspended for {now.s - due_s:.1f} s: silence counts from now on"
    silent = {name: replace(silence, since_s=now.s) for name, silence in cluster.silent.items()}
    return replace(looked, silent=silent), [words.Report(line)]


def on_table_seen(cluster: Cluster, event: words.TableSeen, now: Now) -> Cluster:
    """Mark running replicas that are not ready as silent; the bootstrap service is alive."""
    silent = {
        member.name: _silence(cluster, member, _who(event.silent.get(member.name, ())), now)
        for member in cluster.members.values()
        if _is_replica(member)
        and member.state in (MemberState.RUNNING, MemberState.DRAINING)
        and (member.name, member.incarnation) not in event.ready
    }
    return replace(cluster, silent={**_routers_of(cluster), **silent}, draining=event.draining)


def on_table_lost(cluster: Cluster, now: Now) -> Cluster:
    """Mark the bootstrap service as silent; nothing is known about other members."""
    return replace(cluster, silent={**_routers_of(cluster), **_unanswered(cluster, BOOTSTRAP, now)})


def on_router_seen(cluster: Cluster, event: words.RouterSeen, now: Now) -> Cluster:
    """Mark a router process as alive or silent."""
    others = {name: silence for name, silence in cluster.silent.items() if name != event.name}
    return replace(cluster, silent=others if event.answers else {**others, **_unanswered(cluster, event.name, now)})


def out_of_patience(cluster: Cluster, now: Now) -> list[tuple[Member, str]]:
    """Return the members that have been silent for too long, with a description."""
    late = [
        (member, silence) for member, silence in cluster.silences() if now.s >= silence.since_s + cluster.patience_s
    ]
    return [(member, silence.reason) for member, silence in late]


def _unanswered(cluster: Cluster, name: str, now: Now) -> dict[str, Silence]:
    """Return the silence of a service, if it runs."""
    member = cluster.members[name]
    if member.state is not MemberState.RUNNING:
        return {}
    return {name: _silence(cluster, member, "it does not answer", now)}


def _routers_of(cluster: Cluster) -> dict[str, Silence]:
    """Return the silence of routers, which the table does not show."""
    return {name: silence for name, silence in cluster.silent.items() if is_router(name)}


def _silence(cluster: Cluster, member: Member, reason: str, now: Now) -> Silence:
    known = cluster.silent.get(member.name)
    since_s = known.since_s if known is not None and known.incarnation == member.incarnation else now.s
    return Silence(member.incarnation, since_s, reason)


def _who(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))} has sent no heartbeat" if ranks else "it is not in the rank table"


def _is_replica(member: Member) -> bool:
    return member.name.startswith(("prefill-", "decode-"))
