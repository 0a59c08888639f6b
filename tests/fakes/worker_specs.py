"""Specifications of workers in a role's first replica."""

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Incarnation, Role, replica_id
from cluster.spec.worker_spec import WorkerSpec

HOST = "127.0.0.1"


def lone_worker(config: DeployConfig, role: Role) -> WorkerSpec:
    """Return the worker of a single-rank replica."""
    return worker_of(config, role, 0)


def worker_of(config: DeployConfig, role: Role, global_rank: int) -> WorkerSpec:
    """Return one of several workers."""
    return WorkerSpec(
        config=config,
        replica=replica_id(role, 0),
        incarnation=Incarnation(1),
        global_rank=global_rank,
        host=HOST,
    )
