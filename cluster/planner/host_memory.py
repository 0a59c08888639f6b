"""Host memory that `baton plan` expects workers to take, and checks of the machine's memory against it."""

from cluster.planner.model import ModelFacts
from cluster.planner.weights import weights_gib
from cluster.spec.config import DecodeConfig, DeployConfig, Device, PrefillConfig, TransferBackendName
from cluster.spec.errors import Problem
from cluster.spec.hicache_config import STORE_CLIENT_BYTES, StorageBackendName
from cluster.spec.host_memory import HostMemory
from cluster.spec.pool import GIB
from cluster.spec.ranks import sizes_of, world_size

Pool = PrefillConfig | DecodeConfig


def expected_host_memory(config: DeployConfig, pool: Pool, model: ModelFacts, pool_gib: float) -> HostMemory:
    """Return the host memory of the worker with most weights, given its pool."""
    storage = config.hicache.storage
    is_store = storage.backend is StorageBackendName.MOONCAKE_STORE
    return HostMemory(
        weights=weights_gib(config, pool, model) if config.resources.device is Device.CPU else 0.0,
        pages=pool_gib,
        cached=config.hicache.host_gib if config.kv.prefix_cache else 0.0,
        lent=storage.lent_gib if is_store else 0.0,
        passing=STORE_CLIENT_BYTES / GIB if is_store else 0.0,
    )


def host_memory_problems(config: DeployConfig, expected: dict[str, tuple[Pool, HostMemory]]) -> list[Problem]:
    """Return the problems of the configured machine's host memory."""
    given = config.resources.machine_memory_gib
    lack = host_memory_lack(config, expected, given) if given is not None else ""
    return [Problem("resources.machine_memory_gib", f"got {given:g}; allowed: {lack}")] if lack else []


def host_memory_lack(config: DeployConfig, expected: dict[str, tuple[Pool, HostMemory]], given_gib: float) -> str:
    """Return how much memory a machine needs for all workers, or for the largest if they may be on several; empty if it
    has it.

    ``expected`` is by name of role.
    """
    one_machine = config.transfer.backend is TransferBackendName.SHARED_MEMORY
    counts = {
        name: pool.replicas * world_size(sizes_of(pool.parallel)) if one_machine else 1
        for name, (pool, _) in expected.items()
    }
    needs = [counts[name] * memory.total for name, (_, memory) in expected.items()]
    wanted = sum(needs) if one_machine else max(needs)
    if wanted <= given_gib:
        return ""
    each = "; ".join(
        f"{counts[name]} {name} worker{'s' * (counts[name] > 1)} of {memory}" for name, (_, memory) in expected.items()
    )
    where = "for" if one_machine else "for the larger of"
    return f"at least {wanted:.4g}, {where} {each}"
