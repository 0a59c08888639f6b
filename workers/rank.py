"""Device side of one worker: model, groups, page pool in transfer memory, and the runner over them."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cluster.grammar import Grammars
from cluster.spec.decode_graphs import captures_decode, why_not_captured
from cluster.spec.env import CACHE_DIR
from cluster.spec.hicache_config import StorageBackendName
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.memory import GIB, pool_layout
from cluster.spec.worker_spec import WorkerSpec
from transfer.backends.interface import Region, TransferBackend, make_backend
from workers.attention.interface import AttentionBackend
from workers.attention.registry import choose_backend, needs_of
from workers.context_parallel.cost_model import ModelShape, Rates
from workers.device import open_device
from workers.engine.calibration import measured_rates
from workers.engine.capture import Capture, GraphCapture
from workers.engine.pool_memory import pool_memory_gib
from workers.engine.rank_groups import RankGroups, join_groups
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model, torch_dtype
from workers.hicache.storage.weights import weights_digest
from workers.kernels import elementwise
from workers.memory.copy import PinnedMemory
from workers.memory.peer_memory import PeerMemory, open_peer_memory
from workers.models.decoder import DecoderModel
from workers.models.interface import DecoderConfig
from workers.models.registry import read_model_config
from workers.native.library import Library
from workers.parallel.groups import ReplicaStore, leave_store
from workers.trace.step_recorder import StepRecorder

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Parts of one worker that live as long as its process."""

    geometry: KvGeometry
    layout: PoolLayout
    memory: PeerMemory
    """The page pool, and the memory by which peers reach it."""
    backend: TransferBackend
    host_region: Region | None
    """Host memory for cached pages, if there is any."""
    weights: str
    """Digest of the weights, under which pages are stored; empty if they are not stored."""
    model: DecoderModel
    runner: ModelRunner
    step_recorder: StepRecorder
    model_shape: ModelShape
    rates: Rates
    """Rates of the slowest rank of the replica. On decode, where nothing depends on them, they are the defaults."""
    grammars: Grammars | None
    """Grammars, on ranks that sample."""
    groups: RankGroups
    pinned: PinnedMemory
    """Pinned host memory of both regions, if there is a GPU."""

    def close(self) -> None:
        """Release the transfer memory. Later writes by peers fail."""
        with ExitStack() as closing:  # the last one first
            if self.grammars is not None:
                closing.callback(self.grammars.close)
            closing.callback(self.backend.close)
            closing.callback(self.pinned.close)


def load_rank(spec: WorkerSpec, folder: Path, store: ReplicaStore) -> Rank:
    """Join the groups, load the weights, allocate the pool. Every rank of the replica calls this."""
    with ExitStack() as on_failure:
        # Peers that wait for this rank, to join a group or warm up, end now, instead of after the timeout.
        on_failure.callback(leave_store, store, spec.global_rank)
        # Before the groups, which only ranks that have their GPUs can join.
        device = open_device(spec.config.resources.device)
        model_config = read_model_config(folder)
        model_config.check_layout(spec.pool.parallel, f"{spec.role}.parallel")
        model_config.check_ring(spec.config.prefill)
        groups = join_groups(spec, store, model_config)
        on_failure.callback(groups.leave)
        rank = _load(spec, folder, model_config, device, groups, store, on_failure)
        on_failure.pop_all()
    return rank


def _load(
    spec: WorkerSpec,
    folder: Path,
    model_config: DecoderConfig,
    device: torch.device,
    groups: RankGroups,
    store: ReplicaStore,
    on_failure: ExitStack,
) -> Rank:
    config = spec.config
    draws = groups.pipeline.is_last and groups.cp.rank == groups.model.tp.rank == 0
    grammars = Grammars(folder, model_config.vocab_size) if draws else None
    dtype_name = model_config.dtype if config.model.dtype == "auto" else config.model.dtype
    geometry = model_config.kv_geometry(config.model.name, dtype_name, config.kv.page_size)
    dtype = torch_dtype(dtype_name)
    model = load_model(folder, dtype=dtype, device=device, groups=groups.model)
    attention = choose_backend(config.resources.attention, device, dtype, needs_of(geometry.groups))
    _log.info("attention by %s: %s", attention.name, attention.reason)
    if attention.name == "native":
        elementwise.register("cpu", torch.bfloat16, Library.load())
    is_windowed = any(model_config.windows)
    make_capture = None if is_windowed else _make_captures(spec, device)
    memory_gib = pool_memory_gib(spec, store, model, attention.backend, groups, geometry, make_capture)
    layout = pool_layout(geometry, spec.sizes, spec.coords, memory_gib)
    backend = make_backend(config.transfer.backend, spec.host, config.transfer.protocol)
    memory = open_peer_memory(layout, device, backend, config.verify_by(), groups.head_copies)
    pool, region = memory.pool, memory.region
    host_bytes = host_bytes_of(spec, layout)
    host_region = backend.allocate(host_bytes) if host_bytes else None
    is_stored = host_region is not None and config.hicache.storage.backend is not StorageBackendName.NONE
    on_gpu = device.type == "cuda"
    regions = [region, host_region] if host_region is not None else [region]
    pinned = PinnedMemory([each.buffer for each in regions if each.buffer.nbytes] if on_gpu else [])
    runner = _make_runner(spec, model, memory, attention.backend, groups, grammars)
    on_failure.callback(runner.drop_graphs)
    if make_capture is not None:
        runner.capture_decode(config.decode.max_requests, make_capture())
        _log.info("CUDA graphs of decode steps hold %.3g GiB", runner.graph_bytes / GIB)
    elif reason := "sliding windows" if is_windowed else why_not_captured(config, spec.pool):
        runner.why_not_captured = reason
        _log.info("decode steps are not captured: %s", reason)
    shape, rates = measured_rates(spec, store, model, pool, attention.backend, groups, dtype_name)
    return Rank(
        geometry=geometry,
        layout=layout,
        memory=memory,
        backend=backend,
        host_region=host_region,
        weights=weights_digest(folder, CACHE_DIR.get() / "weights") if is_stored else "",
        model=model,
        runner=runner,
        step_recorder=StepRecorder(model, (groups.cp, *groups.pipeline.links)),
        model_shape=shape,
        rates=rates,
        grammars=grammars,
        groups=groups,
        pinned=pinned,
    )


def _make_runner(
    spec: WorkerSpec,
    model: DecoderModel,
    memory: PeerMemory,
    attention: AttentionBackend,
    groups: RankGroups,
    grammars: Grammars | None,
) -> ModelRunner:
    """Return a runner after its warm-up."""
    runner = ModelRunner(
        model,
        memory.pool,
        attention,
        groups.cp,
        spec.ownership,
        grammars,
        pipeline=groups.pipeline,
        peer_memory=memory,
    )
    runner.warm_up()
    return runner


def _make_captures(spec: WorkerSpec, device: torch.device) -> Callable[[], Capture] | None:
    """Return a factory for captures of decode steps; None if decode steps are not captured."""
    if not captures_decode(spec.config, spec.pool):
        return None
    return partial(GraphCapture, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def host_bytes_of(spec: WorkerSpec, layout: PoolLayout) -> int:
    """Return the size of this worker's host memory for cached pages, in bytes. It is a multiple of the page size, and 0
    if nothing is cached.
    """
    if not spec.config.kv.prefix_cache:
        return 0
    return spec.config.hicache.host_bytes // layout.page_bytes * layout.page_bytes
