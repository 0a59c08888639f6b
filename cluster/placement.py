"""Placement of workers on machines: configuration and machines in, seats out. Pure; reserving happens elsewhere.

Every worker asks for the same resources, so a machine is a number of free workers' worth of resources. The router and
the bootstrap service ask for none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.actors import Demand, Machine, Seat
from cluster.spec.config import DeployConfig, Device, PoolConfig, TransferBackendName
from cluster.spec.errors import ConfigError, Problem
from cluster.spec.ids import ReplicaId, Role, replica_id, role_of
from cluster.spec.ranks import sizes_of, world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlacement:
    """Seats of the workers of one replica."""

    replica: ReplicaId
    role: Role
    seats: tuple[Seat, ...]
    """Seats by global rank."""


def place(
    config: DeployConfig, machines: Sequence[Machine], only: Sequence[ReplicaId] | None = None
) -> list[ReplicaPlacement]:
    """Place the given replicas, or those of the configuration, on free resources; in the order prefill, decode, index.

    A replica takes as few machines as it fits on, and replicas of a role stay apart where that costs nothing. Where
    every worker must be on one machine, the first that holds them all is taken.

    Raises:
        ConfigError: the workers do not fit; the message names what is wanted and what is free.
    """
    wanted = [_wanted(config, replica) for replica in (_replicas(config) if only is None else only)]
    num_workers = sum(item.size for item in wanted)
    places = {machine.node_id: _places(machine, config, num_workers) for machine in machines}
    if problems := _fit_problems(config, machines, places, num_workers):
        raise ConfigError(problems)
    if config.transfer.backend is TransferBackendName.SHARED_MEMORY:
        places = _one_machine(places, num_workers)
    return _assign(config, places, wanted)


def demand_of(config: DeployConfig) -> Demand:
    """Return what the replicas of the configuration need, on any machines."""
    cpus, gpus = _resources(config)
    return Demand(
        num_seats=sum(_wanted(config, replica).size for replica in _replicas(config)),
        cpus=cpus,
        gpus=gpus,
        on_one_machine=config.transfer.backend is TransferBackendName.SHARED_MEMORY,
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    replica: ReplicaId
    role: Role
    size: int
    """Number of workers."""


def _replicas(config: DeployConfig) -> list[ReplicaId]:
    pools: list[tuple[Role, PoolConfig]] = [(Role.PREFILL, config.prefill), (Role.DECODE, config.decode)]
    return [replica_id(role, index) for role, pool in pools for index in range(pool.replicas)]


def _wanted(config: DeployConfig, replica: ReplicaId) -> _Wanted:
    role = role_of(replica)
    pool: PoolConfig = config.prefill if role is Role.PREFILL else config.decode
    return _Wanted(replica, role, world_size(sizes_of(pool.parallel)))


def _resources(config: DeployConfig) -> tuple[float, float]:
    return config.resources.cpus_per_worker, 1.0 if config.resources.device is Device.CUDA else 0.0


def _places(machine: Machine, config: DeployConfig, most: int) -> int:
    """Return the number of workers that fit on a machine, at most ``most``."""
    cpus, gpus = _resources(config)
    limits = [int(free / wanted + 1e-6) for free, wanted in ((machine.cpus, cpus), (machine.gpus, gpus)) if wanted]
    return min([most, *limits])


def _fit_problems(
    config: DeployConfig, machines: Sequence[Machine], places: dict[str, int], num_workers: int
) -> list[Problem]:
    cpus, gpus = _resources(config)
    each = f"{num_workers} workers with {cpus:g} CPUs" + (f" and {gpus:g} GPU" if gpus else "") + " each"
    there = (
        ", ".join(f"{machine.address} {machine.cpus:g} CPUs {machine.gpus:g} GPUs" for machine in machines)
        or "no machine"
    )
    if sum(places.values()) < num_workers:
        message = f"wanted: {each}; room for {sum(places.values())} workers; free: {there}"
        return [Problem("resources", message)]
    if config.transfer.backend is TransferBackendName.SHARED_MEMORY and max(places.values()) < num_workers:
        message = (
            f"shared_memory needs all workers on one machine; wanted: {each}; "
            f"largest room: {max(places.values())} workers; free: {there}; allowed on several machines: mooncake"
        )
        return [Problem("transfer.backend", message)]
    return []


def _one_machine(places: dict[str, int], num_workers: int) -> dict[str, int]:
    return dict([next(item for item in places.items() if item[1] >= num_workers)])


def _assign(config: DeployConfig, places: dict[str, int], wanted: list[_Wanted]) -> list[ReplicaPlacement]:
    """Assign machines, largest replicas first, so that small ones do not fragment the space they need."""
    cpus, gpus = _resources(config)
    free = dict(places)
    used: dict[Role, list[str]] = {role: [] for role in Role}
    seats: dict[ReplicaId, tuple[Seat, ...]] = {}
    for item in sorted(wanted, key=lambda item: -item.size):
        node_ids = _take(free, used[item.role], item.size)
        used[item.role] += node_ids
        seats[item.replica] = tuple(Seat(node_id=node_id, cpus=cpus, gpus=gpus) for node_id in node_ids)
    return [ReplicaPlacement(replica=item.replica, role=item.role, seats=seats[item.replica]) for item in wanted]


def _take(free: dict[str, int], used: list[str], size: int) -> list[str]:
    """Take resources for one replica: on one machine if any holds it, else on the emptiest ones."""
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
    assert len(taken) == size, f"{size} places wanted, {len(taken)} taken"
    return taken
