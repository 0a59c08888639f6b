"""Specifications of workers of the first replica of a role."""

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Incarnation, Role, replica_id
from cluster.spec.worker_spec import WorkerSpec

HOST = "127.0.0.1"


def lone_worker(config: DeployConfig, role: Role) -> WorkerSpec:
    """That which is a replica by itself: its parallel sizes must all be one."""
    return worker_of(config, role, 0)


def worker_of(config: DeployConfig, role: Role, global_rank: int) -> WorkerSpec:
    """One of several."""
    return WorkerSpec(
        config=config,
        replica=replica_id(role, 0),
        incarnation=Incarnation(1),
        global_rank=global_rank,
        host=HOST,
    )
