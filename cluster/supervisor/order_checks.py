"""Validity checks of operator commands against the current cluster, and their effects. Pure."""

from collections.abc import Collection

from cluster.spec.ids import ReplicaId, replica_id
from cluster.spec.lifecycle import Role, role_of
from cluster.supervisor.orders import DrainOrder, Order, RestartOrder, ResumeOrder, ScaleOrder, TellOrder
from cluster.supervisor.state import Cluster, MemberState, Phase

_MAX_REPLICAS = 4096


def refusal(cluster: Cluster, order: Order) -> str | None:
    """Return why a command cannot be carried out; None if it can."""
    if cluster.phase is not Phase.SERVING:
        return f"the cluster is {cluster.phase}; commands are accepted while it is {Phase.SERVING}"
    if cluster.order is not None:
        return "another command is being carried out; try again when it has finished"
    match order:
        case DrainOrder(replica=name):
            return why_not_running(cluster, name) or why_needed(cluster, name)
        case ResumeOrder(replica=name):
            return why_not_running(cluster, name)
        case RestartOrder():
            names = order.replicas or running(cluster)
            reasons = [why_not_running(cluster, name) for name in names]
            if order.is_rolling and not any(reasons):
                reasons = [why_needed(cluster, name) for name in names]
            return next(filter(None, reasons), None)
        case ScaleOrder():
            return _scale_refusal(cluster, order)
        case TellOrder():
            return None


def difference(cluster: Cluster, order: ScaleOrder) -> tuple[list[str], list[str]]:
    """Return the replicas that a command adds, and those that it removes."""
    missing: list[str] = []
    extra: list[str] = []
    for role, number in numbers_of(order).items():
        wanted = [str(replica_id(role, index)) for index in range(number)]
        there = [name for name in _replicas(cluster, role) if cluster.members[name].is_wanted]
        missing += [name for name in wanted if name not in there]
        extra += [name for name in there if name not in wanted]
    return missing, extra


def numbers_of(order: ScaleOrder) -> dict[Role, int]:
    """Return the numbers of replicas in a command, by role."""
    given = {Role.PREFILL: order.prefill, Role.DECODE: order.decode}
    return {role: number for role, number in given.items() if number is not None}


def running(cluster: Cluster) -> tuple[str, ...]:
    """Return all running replicas."""
    names = [name for role in Role for name in _replicas(cluster, role)]
    return tuple(name for name in names if cluster.members[name].state is MemberState.RUNNING)


def why_not_running(cluster: Cluster, name: str) -> str | None:
    """Return the state of a replica that is not running; None if it runs."""
    names = [name for role in Role for name in _replicas(cluster, role)]
    if name not in names:
        return f"replica: there is no {name!r}; there are: {', '.join(names)}"
    state = cluster.members[name].state
    return None if state is MemberState.RUNNING else f"{name}: it is {state}; allowed: a running replica"


def why_needed(cluster: Cluster, name: str) -> str | None:
    """Return why a replica is needed; None if it is not."""
    role = role_of(ReplicaId(name))
    if _is_served(cluster, role, without=[name]):
        return None
    return f"{name}: no other {role} replica takes requests; `baton scale {role}=2` adds one"


def _scale_refusal(cluster: Cluster, order: ScaleOrder) -> str | None:
    numbers = numbers_of(order)
    if not numbers or not all(1 <= number <= _MAX_REPLICAS for number in numbers.values()):
        given = ", ".join(f"{role}={number}" for role, number in numbers.items()) or "nothing"
        return f"scale: got {given}; allowed: prefill and decode from 1 to {_MAX_REPLICAS}"
    _, extra = difference(cluster, order)
    for role in numbers:
        going = [name for name in extra if role_of(ReplicaId(name)) is role]
        if going and not _is_served(cluster, role, without=going):
            return f"scale: no {role} replica that remains takes requests; those to be removed: {', '.join(going)}"
    return None


def _is_served(cluster: Cluster, role: Role, without: Collection[str]) -> bool:
    """Return whether some replica of a role, other than these, takes new requests."""
    others = [cluster.members[name] for name in _replicas(cluster, role) if name not in without]
    return any(
        member.state is MemberState.RUNNING and (member.name, member.incarnation) not in cluster.draining
        for member in others
    )


def _replicas(cluster: Cluster, role: Role) -> list[str]:
    return [
        name
        for name, member in cluster.members.items()
        if name.startswith(f"{role}-") and member.state is not MemberState.REMOVED
    ]
