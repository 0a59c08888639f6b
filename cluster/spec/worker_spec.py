"""What a worker or router process is told when it starts."""

from dataclasses import dataclass, field

from cluster.spec.config import DeployConfig, PoolConfig
from cluster.spec.ids import ROUTER, Incarnation, ReplicaId
from cluster.spec.lifecycle import Role
from cluster.spec.registry import KvOwnership, RankCoords


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelKey:
    """The key pair that the processes of one cluster share: who has it may send to all of them."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the control services of one cluster are, and what opens them."""

    bootstrap_url: str
    token: str = field(repr=False)
    """Bearer token of every bootstrap route."""
    channel_key: ChannelKey | None = None
    """Without one, whoever reaches a process may send to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlace:
    """One router process among those that share a port."""

    name: ReplicaId = ROUTER
    index: int = 0
    num_processes: int = 1
    board: str = ""
    """File that they share; none for one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One rank of one start of one replica."""

    config: DeployConfig
    role: Role
    replica: ReplicaId
    incarnation: Incarnation
    coords: RankCoords
    sizes: RankCoords
    global_rank: int
    world_size: int
    host: str
    """Address that the other processes reach this worker at."""

    @property
    def pool(self) -> PoolConfig:
        """The configuration of this worker's role."""
        return self.config.prefill if self.role is Role.PREFILL else self.config.decode

    def longest_context(self, of_model: int) -> int:
        """Most tokens of one request, prompt and answer together, where the model has such a limit of its own."""
        return self.config.model.max_context or of_model

    @property
    def ownership(self) -> KvOwnership:
        """Where the KV of a request lives in this worker's CP group."""
        return self.pool.ownership

    @property
    def is_leader(self) -> bool:
        """Whether this rank schedules."""
        return self.global_rank == 0
