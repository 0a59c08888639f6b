"""Size of a worker's page pool: the configured size, or what is free on the GPU with the least free memory."""

import logging
from collections.abc import Callable
from dataclasses import replace

from cluster.spec.errors import UserError
from cluster.spec.kv import KvGeometry
from cluster.spec.memory import GIB, GpuMemory, page_layout
from cluster.spec.registry import KvOwnership
from cluster.spec.worker_spec import WorkerSpec
from workers.attention.interface import AttentionBackend
from workers.engine.captures import Capture
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.layers.attention_config import LatentAttentionConfig
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.parallel.store import ReplicaStore, exchange_at_start

_log = logging.getLogger(__name__)

_PREFIXES = 8
"""Length of the prefixes of short extends, as a multiple of theirs, with which latents are not expanded."""


def pool_memory_gib(
    spec: WorkerSpec,
    store: ReplicaStore,
    model: DecoderModel,
    attention: AttentionBackend,
    groups: RankGroups,
    geometry: KvGeometry,
    make_capture: Callable[[], Capture] | None,
) -> float:
    """Return the pool size in GiB. Every rank of the replica calls this after loading its weights.

    ``make_capture`` is given if the rank will capture decode steps.

    Raises:
        UserError: weights, a step, graphs and pages do not fit in memory. The message shows the arithmetic.
    """
    given = spec.config.kv_memory_gib
    if not model.device.has_own_memory:
        assert given is not None, "kv.memory_gib must be set on a CPU"
        return given
    page = PagePool(page_layout(geometry, spec.sizes, spec.coords), device=model.device.torch_device)
    runner = ModelRunner(model, page, attention, groups, spec.ownership)
    memory = _measure(spec, model, runner, make_capture)
    _log.info("%s", memory)
    needed, key = (given, "kv.memory_gib") if given else (2 * page.page_bytes / GIB, "kv.memory_fraction")
    if memory.left < needed:
        raise UserError(f"{key}: {needed:.3g} GiB needed for pages, but {memory}")
    return given or least_of_all(spec, store, memory.left)


def _measure(
    spec: WorkerSpec, model: DecoderModel, runner: ModelRunner, make_capture: Callable[[], Capture] | None
) -> GpuMemory:
    """Measure memory use with weights but without a pool. The step's own pages count as activations.

    Graphs are captured over a single page here, and again later over the pool, at the pool's addresses.
    """
    pool_config = spec.pool
    chunk_len = pool_config.chunk_tokens
    longest = spec.config.model.longest_context(model.config.max_position_embeddings)

    def compute() -> None:
        # The largest step is the last one of the longest prompt, since exchanges between ranks grow with the prefix.
        strategy, most_requests = spec.config.prefill.strategy.fullest, min(pool_config.max_requests, chunk_len)
        extend_len = chunk_len // most_requests
        for passing in spec.config.prefill.passing.candidates if spec.ownership is KvOwnership.SHARDED else [None]:
            runner.run_dummy(chunk_len, max(longest - chunk_len, 0), strategy, passing)
            if isinstance(model.config.attention, LatentAttentionConfig):
                # Or one of many short extends, for which latents are not expanded.
                runner.run_dummy(extend_len, _PREFIXES * extend_len, strategy, passing, most_requests)
        runner.sample_dummy(pool_config.max_requests)

    memory = model.device.measure_memory(compute, spec.config.kv.memory_fraction)
    if make_capture is None:
        return memory
    try:
        runner.capture_decode(pool_config.max_requests, make_capture())
    finally:
        runner.drop_graphs()
    return replace(memory, graphs=runner.graph_bytes / GIB)


def least_of_all(spec: WorkerSpec, store: ReplicaStore, gib: float) -> float:
    """Return the smallest of all ranks' sizes, since all ranks have the same number of pages."""
    return min(map(float, exchange_at_start(store, "pool_gib", spec.global_rank, spec.world_size, repr(gib))))
