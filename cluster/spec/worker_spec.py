"""Startup arguments of worker and router processes."""

import time
from dataclasses import dataclass, field

from cluster.spec.config import DeployConfig, Pool
from cluster.spec.ids import ROUTER, Incarnation, ReplicaId, Role, role_of, router_names
from cluster.spec.ranks import coords_of, sizes_of, world_size
from cluster.spec.registry import AxisSizes, KvOwnership, RankCoords


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelKey:
    """Key pair shared by the processes of one cluster. Every holder may send to all of them."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Addresses of a cluster's control services, their credentials, and the cluster's start."""

    bootstrap_url: str
    token: str = field(repr=False)
    """Bearer token of every bootstrap route."""
    channel_key: ChannelKey | None = None
    """Key of all channels; if None, anyone who reaches a process can send to it."""
    started: float = field(default_factory=time.time)
    """Unix time at which the cluster started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShare:
    """One of the router processes that share a port, and its share of the router's limits."""

    name: ReplicaId = ROUTER
    index: int = 0
    num_processes: int = 1

    def of(self, limit: int) -> int:
        """Return this process's equal part of a limit: at least 1, unless the limit is 0."""
        share, remainder = divmod(limit, self.num_processes)
        return min(limit, max(1, share + (self.index < remainder)))


ALONE = RouterShare()


def router_shares(num_processes: int) -> list[RouterShare]:
    return [
        RouterShare(name=name, index=index, num_processes=num_processes)
        for index, name in enumerate(router_names(num_processes))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One rank of one incarnation of a replica."""

    config: DeployConfig
    replica: ReplicaId
    incarnation: Incarnation
    global_rank: int
    host: str
    """Address at which other processes reach this worker."""

    @property
    def role(self) -> Role:
        return role_of(self.replica)

    @property
    def pool(self) -> Pool:
        return self.config.pools[self.role]

    @property
    def sizes(self) -> AxisSizes:
        return sizes_of(self.pool.parallel)

    @property
    def coords(self) -> RankCoords:
        return coords_of(self.global_rank, self.sizes)

    @property
    def world_size(self) -> int:
        return world_size(self.sizes)

    @property
    def ownership(self) -> KvOwnership:
        return self.pool.ownership

    @property
    def is_leader(self) -> bool:
        return self.global_rank == 0
