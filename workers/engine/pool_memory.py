"""Size of a worker's page pool: as configured, or the free GPU memory of the rank with the least."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from cluster.spec.config import Device
from cluster.spec.errors import UserError
from cluster.spec.kv import KvGeometry
from cluster.spec.memory import GIB, GpuMemory, page_layout
from cluster.spec.registry import KvOwnership
from cluster.spec.worker_spec import WorkerSpec
from workers.attention.interface import AttentionBackend
from workers.engine.capture import Capture
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.parallel.groups import ReplicaStore, exchange_at_start

_log = logging.getLogger(__name__)


def pool_memory_gib(
    spec: WorkerSpec,
    store: ReplicaStore,
    model: DecoderModel,
    attention: AttentionBackend,
    groups: RankGroups,
    geometry: KvGeometry,
    make_capture: Callable[[], Capture] | None,
) -> float:
    """Return the pool's size. Every rank of the replica calls this with its weights loaded; ``make_capture`` is given
    if it will capture decode steps.

    Raises:
        UserError: weights, a step, graphs and the pages do not fit, with the arithmetic.
    """
    given = spec.config.kv_memory_gib
    if spec.config.resources.device is Device.CPU:
        assert given is not None, "a CPU has no memory of its own to measure"
        return given
    page = PagePool(page_layout(geometry, spec.sizes, spec.coords), device=model.device)
    runner = ModelRunner(model, page, attention, groups.cp, spec.ownership, pipeline=groups.pipeline)
    memory = _measure(spec, model, runner, make_capture)
    _log.info("%s", memory)
    check_fits(memory, given or 2 * page.page_bytes / GIB, "kv.memory_gib" if given else "kv.memory_fraction")
    return given or least_of_all(spec, store, memory.left)


def _measure(
    spec: WorkerSpec, model: DecoderModel, runner: ModelRunner, make_capture: Callable[[], Capture] | None
) -> GpuMemory:
    """Measure memory; graphs are captured once over the only page, since later ones need the pool's addresses."""
    pool_config = spec.pool
    chunk_len = pool_config.chunk_tokens
    longest = spec.config.model.longest_context(model.config.max_position_embeddings)
    is_sharded = spec.ownership is KvOwnership.SHARDED

    def run_largest_step() -> None:
        """Run the last step of the longest prompt: exchanges between ranks grow with the prefix."""
        strategy = spec.config.prefill.strategy.fullest
        for passing in spec.config.prefill.passing.candidates if is_sharded else [None]:
            runner.run_dummy(chunk_len, max(longest - chunk_len, 0), strategy, passing)
        runner.sample_dummy(pool_config.max_requests)

    memory = measure_memory(model.device, spec.config.kv.memory_fraction, run_largest_step)
    if make_capture is None:
        return memory
    try:
        runner.capture_decode(pool_config.max_requests, make_capture())
    finally:
        runner.drop_graphs()
    return replace(memory, graphs=runner.graph_bytes / GIB)


def least_of_all(spec: WorkerSpec, store: ReplicaStore, gib: float) -> float:
    """Return the smallest size over all ranks, since all ranks have the same number of pages."""
    return min(map(float, exchange_at_start(store, "pool_gib", spec.global_rank, spec.world_size, repr(gib))))


def measure_memory(device: torch.device, fraction: float, run_largest_step: Callable[[], None]) -> GpuMemory:
    """Measure memory with the weights loaded and no pages yet; the step's own pages count as activations."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return GpuMemory(
        total=total / GIB,
        fraction=fraction,
        weights=weights / GIB,
        activations=(peak - weights) / GIB,
        others=max(others, 0) / GIB,
    )


def check_fits(memory: GpuMemory, pages_gib: float, key: str) -> None:
    """Raise UserError, with the arithmetic, if the memory left cannot hold the pages."""
    if memory.left < pages_gib:
        raise UserError(f"{key}: {pages_gib:.3g} GiB requested for pages, but {memory}")
