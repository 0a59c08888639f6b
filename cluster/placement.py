"""Placement of workers on machines. Pure: nothing is reserved here.

All workers need the same resources, so a machine's capacity is a number of workers. The router and the bootstrap
service reserve no resources.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.actors import Bundle, Demand, Machine
from cluster.spec.config import DeployConfig, Device, TransferBackendName
from cluster.spec.errors import ConfigError, Problem
from cluster.spec.ids import ReplicaId, Role, replica_id, role_of
from cluster.spec.ranks import sizes_of, world_size

_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlacement:
    replica: ReplicaId
    bundles: tuple[Bundle, ...]
    """Bundles by global rank."""


def place(
    config: DeployConfig, machines: Sequence[Machine], only: Sequence[ReplicaId] | None = None
) -> list[ReplicaPlacement]:
    """Place replicas on free resources; by default, all replicas of the configuration.

    A replica uses as few machines as possible, and replicas of a role are spread over machines if that splits no
    replica. If all workers must be on one machine, the first one with enough capacity is used.

    Raises:
        ConfigError: the workers do not fit; the message names what is wanted and what is free.
    """
    sizes = {replica: _size(config, replica) for replica in (_replicas(config) if only is None else only)}
    num_workers = sum(sizes.values())
    capacity = {machine.node_id: _capacity(machine, config, num_workers) for machine in machines}
    if problems := _fit_problems(config, machines, capacity, num_workers):
        raise ConfigError(problems)
    if config.transfer.backend is TransferBackendName.SHARED_MEMORY:
        capacity = dict([next(item for item in capacity.items() if item[1] >= num_workers)])
    return _assign(config, capacity, sizes)


def demand_of(config: DeployConfig, only: Sequence[ReplicaId] | None) -> Demand:
    """Return the bundles that replicas need; by default, all replicas of the configuration."""
    cpus, gpus = _resources(config)
    return Demand(
        num_bundles=sum(_size(config, replica) for replica in (_replicas(config) if only is None else only)),
        cpus=cpus,
        gpus=gpus,
        on_one_machine=config.transfer.backend is TransferBackendName.SHARED_MEMORY,
    )


def _replicas(config: DeployConfig) -> list[ReplicaId]:
    return [replica_id(role, index) for role, pool in config.pools.items() for index in range(pool.replicas)]


def _size(config: DeployConfig, replica: ReplicaId) -> int:
    return world_size(sizes_of(config.pools[role_of(replica)].parallel))


def _resources(config: DeployConfig) -> tuple[float, float]:
    resources = config.resources
    return resources.cpus_per_worker, resources.gpus_per_worker if resources.device is Device.CUDA else 0.0


def _capacity(machine: Machine, config: DeployConfig, most: int) -> int:
    """Return the number of workers that fit on a machine, at most ``most``."""
    cpus, gpus = _resources(config)
    whole_gpus = int(machine.gpus + _ROUNDING)
    limits = [_times(machine.cpus, cpus)] if cpus else []
    limits += [whole_gpus * _times(1.0, gpus) + _times(machine.gpus - whole_gpus, gpus)] if gpus else []
    return min([most, *limits])


def _times(free: float, wanted: float) -> int:
    return int(free / wanted + _ROUNDING)


def _fit_problems(
    config: DeployConfig, machines: Sequence[Machine], capacity: dict[str, int], num_workers: int
) -> list[Problem]:
    cpus, gpus = _resources(config)
    wanted = f"{num_workers} workers with {cpus:g} CPUs" + (f" and {gpus:g} GPU" if gpus else "") + " each"
    there = ", ".join(f"{each.address} {each.cpus:g} CPUs {each.gpus:g} GPUs" for each in machines) or "no machine"
    if sum(capacity.values()) < num_workers:
        message = f"wanted: {wanted}; capacity for {sum(capacity.values())} workers; free: {there}"
        return [Problem("resources", message)]
    if config.transfer.backend is TransferBackendName.SHARED_MEMORY and max(capacity.values()) < num_workers:
        message = (
            f"shared_memory needs all workers on one machine; wanted: {wanted}; "
            f"the largest machine has capacity for {max(capacity.values())} workers; free: {there}; "
            "allowed on several machines: mooncake"
        )
        return [Problem("transfer.backend", message)]
    return []


def _assign(config: DeployConfig, capacity: dict[str, int], sizes: dict[ReplicaId, int]) -> list[ReplicaPlacement]:
    """Assign machines to large replicas first, so that small ones do not fragment the space they need."""
    cpus, gpus = _resources(config)
    free = dict(capacity)
    used: dict[Role, list[str]] = {role: [] for role in Role}
    bundles: dict[ReplicaId, tuple[Bundle, ...]] = {}
    for replica in sorted(sizes, key=lambda replica: -sizes[replica]):
        node_ids = _take(free, used[role_of(replica)], sizes[replica])
        used[role_of(replica)] += node_ids
        bundles[replica] = tuple(Bundle(node_id=node_id, cpus=cpus, gpus=gpus) for node_id in node_ids)
    return [ReplicaPlacement(replica=replica, bundles=bundles[replica]) for replica in sizes]


def _take(free: dict[str, int], used: list[str], size: int) -> list[str]:
    """Take capacity for one replica: on one machine if any has enough, otherwise on those with the most capacity."""
    whole = [node_id for node_id, count in free.items() if count >= size]
    if whole:
        chosen = [min(whole, key=lambda node_id: (used.count(node_id), free[node_id], node_id))]
    else:
        chosen = sorted(free, key=lambda node_id: (-free[node_id], node_id))
    taken: list[str] = []
    for node_id in chosen:
        count = min(free[node_id], size - len(taken))
        free[node_id] -= count
        taken += [node_id] * count
    assert len(taken) == size, f"{size} bundles wanted, {len(taken)} taken"
    return taken
