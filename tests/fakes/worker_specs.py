"""The specification of a worker that is a replica by itself."""

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Incarnation, replica_id
from cluster.spec.lifecycle import Role
from cluster.spec.ranks import coords_of, sizes_of
from cluster.spec.worker_spec import WorkerSpec

HOST = "127.0.0.1"


def lone_worker(config: DeployConfig, role: Role) -> WorkerSpec:
    """The first replica of a role, whose parallel sizes must all be one."""
    sizes = sizes_of((config.prefill if role is Role.PREFILL else config.decode).parallel)
    return WorkerSpec(
        config=config,
        role=role,
        replica=replica_id(role, 0),
        incarnation=Incarnation(1),
        coords=coords_of(0, sizes),
        sizes=sizes,
        global_rank=0,
        world_size=1,
        host=HOST,
    )
