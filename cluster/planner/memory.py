"""KV capacity of each worker, and checks of whether a model fits a configuration."""

import math
from dataclasses import dataclass

from cluster.planner.model import ModelFacts
from cluster.planner.worker_memory import expected_host_memory, expected_memory
from cluster.spec.checks import layout_problems, ring_problems
from cluster.spec.config import DeployConfig, Device, Pool, TransferBackendName
from cluster.spec.errors import Problem
from cluster.spec.hicache_config import StorageBackendName
from cluster.spec.ids import Role
from cluster.spec.kv import PoolLayout, pages_for
from cluster.spec.memory import GIB, GpuMemory, HostMemory, pool_layout
from cluster.spec.ranks import num_workers, positions, sizes_of
from workers.hicache.storage.page_store import object_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleKv:
    """KV capacity of one role, limited by its worker with the most layers, which has the fewest pages."""

    page_bytes: int
    pages_per_worker: int
    """Number of pages available to requests."""
    tokens_per_worker: int
    tokens_per_request: int
    """Maximum number of tokens in one request, whose pages may be divided over several workers."""
    tokens_per_replica: int
    """Number of tokens that all DP ranks hold in total."""
    pool_bytes: int
    host: HostMemory
    gpu: GpuMemory | None = None
    """Expected use of a GPU's memory; None on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    num_layers: int
    groups: tuple[str, ...]
    page_size: int
    bytes_per_token: int
    """KV bytes of one token over all layers and heads."""
    tokens_per_request: int
    """Maximum number of tokens in one request that fits both roles."""
    roles: dict[Role, RoleKv]


def kv_plan(config: DeployConfig, model: ModelFacts) -> KvPlan:
    """Return the KV capacity of a configuration that model_problems accepts."""
    geometry = model.geometry
    roles = {role: _role_kv(config, pool, model) for role, pool in config.pools.items()}
    return KvPlan(
        num_layers=geometry.num_layers,
        groups=tuple(map(str, geometry.groups)),
        page_size=geometry.page_size,
        bytes_per_token=geometry.bytes_per_token,
        tokens_per_request=min(role.tokens_per_request for role in roles.values()),
        roles=roles,
    )


def model_problems(config: DeployConfig, model: ModelFacts, *, with_gpu: bool = True) -> list[Problem]:
    """Return the problems of a configuration with this model: layout, memory, context length.

    Without ``with_gpu``, GPU memory is not checked, because the worker measures it.
    """
    problems = []
    checks_memory = with_gpu or config.resources.device is Device.CPU
    wanted, most = config.model.max_context, model.config.max_position_embeddings
    if wanted is not None and wanted > most:
        message = f"got {wanted}; allowed: at most {most}, the model's own limit"
        problems.append(Problem("model.max_context", message))
    problems += ring_problems(config.prefill, model.config.limits)
    for role, pool in config.pools.items():
        refused = layout_problems(pool.parallel, f"{role}.parallel", model.config.limits)
        problems += refused or (_memory_problems(config, role, pool, model) if checks_memory else [])
    machine_gib = config.resources.machine_memory_gib
    if checks_memory and not problems and machine_gib is not None and (lack := memory_lack(config, model, machine_gib)):
        problems.append(Problem("resources.machine_memory_gib", f"got {machine_gib:g}; allowed: {lack}"))
    return problems


def memory_wanted(config: DeployConfig, model: ModelFacts, num_tokens: int) -> float:
    """Return the ``kv.memory_gib`` that lets every replica hold a request of this length."""
    num_pages = pages_for(num_tokens, config.kv.page_size) * len(model.geometry.lifetimes)
    return max(
        (-(-num_pages // pool.num_owners) + 1) * _role_kv(config, pool, model).page_bytes / GIB
        for pool in config.pools.values()
    )


def longest_problem(config: DeployConfig, model: ModelFacts) -> str:
    """Return the reason why the longest request does not fit; empty if it does."""
    longest = config.model.longest_context(model.config.max_position_embeddings)
    held = kv_plan(config, model).tokens_per_request
    if held >= longest:
        return ""
    gib = f"{_rounded_up(memory_wanted(config, model, longest)):g}"
    fix = f"set kv.memory_gib to {gib}, or model.max_context to {held}"
    return f"{held} tokens fit, but a request can have {longest}: {fix}"


def _rounded_up(number: float) -> float:
    """Return the smallest number of three significant digits that is not below ``number``, which is positive."""
    unit: float = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / unit) * unit


def _role_kv(config: DeployConfig, pool: Pool, model: ModelFacts) -> RoleKv:
    layout = min(_layouts(config, pool, model), key=lambda layout: layout.num_pages)
    tokens_per_worker = layout.tokens_in(layout.num_pages)
    tokens_per_request = tokens_per_worker * pool.num_owners
    return RoleKv(
        page_bytes=layout.page_bytes,
        pages_per_worker=layout.num_pages,
        tokens_per_worker=tokens_per_worker,
        tokens_per_request=tokens_per_request,
        tokens_per_replica=tokens_per_request * pool.parallel.dp,
        pool_bytes=layout.pool_bytes,
        host=expected_host_memory(config, pool, model, layout.pool_bytes / GIB),
        gpu=expected_memory(config, pool, model) if config.resources.device is Device.CUDA else None,
    )


def memory_lack(config: DeployConfig, model: ModelFacts, machine_gib: float) -> str:
    """Describe how much memory a machine must have for the workers; empty if ``machine_gib`` is enough.

    With shared memory, one machine must hold all workers; otherwise, it must hold at least one worker of either role.
    """
    one_machine = config.transfer.backend is TransferBackendName.SHARED_MEMORY
    counts = {role: num_workers(pool) if one_machine else 1 for role, pool in config.pools.items()}
    expected = {role: _role_kv(config, pool, model).host for role, pool in config.pools.items()}
    needs = [counts[role] * memory.total for role, memory in expected.items()]
    wanted = sum(needs) if one_machine else max(needs)
    if wanted <= machine_gib:
        return ""
    each = "; ".join(
        f"{counts[role]} {role} worker{'s' * (counts[role] > 1)} of {memory}" for role, memory in expected.items()
    )
    where = "for" if one_machine else "for whichever needs more:"
    return f"at least {wanted:.4g}, {where} {each}"


def _layouts(config: DeployConfig, pool: Pool, model: ModelFacts) -> list[PoolLayout]:
    sizes = sizes_of(pool.parallel)
    gib = pool_gib(config, pool, model)
    return [pool_layout(model.geometry, sizes, rank.coords, gib) for rank in positions(pool.parallel)]


def pool_gib(config: DeployConfig, pool: Pool, model: ModelFacts) -> float:
    """Return the memory of one worker's pool: the configured size, or what its GPU is expected to have left."""
    given = config.kv_memory_gib
    return expected_memory(config, pool, model).left if given is None else given


def _memory_key(config: DeployConfig) -> str:
    return "kv.memory_fraction" if config.kv_memory_gib is None else "kv.memory_gib"


def _memory_problems(config: DeployConfig, role: Role, pool: Pool, model: ModelFacts) -> list[Problem]:
    if config.resources.device is Device.CUDA:
        expected, given = expected_memory(config, pool, model), config.kv_memory_gib
        if expected.left < (given or 0) or expected.left <= 0:
            wanted = f"{given} GiB" if given else "some memory too"
            message = f"a {role} worker does not fit: {expected}, and pages need {wanted}"
            return [Problem(_memory_key(config), message)]
    try:
        layouts = _layouts(config, pool, model)
    except ValueError as exc:
        key, gib = _memory_key(config), pool_gib(config, pool, model)
        return [Problem(key, f"got {gib:g}; a {role} worker's {exc}")]
    return _cached_problems(config, role, max(layouts, key=lambda layout: layout.page_bytes))


def _cached_problems(config: DeployConfig, role: Role, layout: PoolLayout) -> list[Problem]:
    """Reject host memory or files that are too small for a single page and would never be used."""
    hicache, storage = config.hicache, config.hicache.storage
    if not hicache.has_host or not config.kv.prefix_cache:
        return []
    problems = []
    if hicache.host_bytes < layout.page_bytes:
        message = f"got {hicache.host_gib:g}; allowed: 0, or {_least(role, layout.page_bytes)}"
        problems.append(Problem("hicache.host_gib", message))
    stored_bytes = object_bytes(layout)
    if storage.backend is StorageBackendName.FILES and storage.max_gib * GIB < stored_bytes:
        message = f"got {storage.max_gib:g}; allowed: {_least(role, stored_bytes)}"
        problems.append(Problem("hicache.storage.max_gib", message))
    return problems


def _least(role: Role, page_bytes: int) -> str:
    least = math.ceil(page_bytes / GIB * 1e6) / 1e6
    return f"at least {least:.6f} GiB; one page of a {role} worker takes {page_bytes} bytes"
