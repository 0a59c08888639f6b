"""Compute side of a worker: its model, process groups, page pool, and runner."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cluster.grammar import Grammars
from cluster.spec.decode_graphs import captures_decode, why_not_captured
from cluster.spec.env import CACHE_DIR
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.memory import GIB, pool_layout
from cluster.spec.worker_spec import WorkerSpec
from transfer.backends.interface import Region, TransferBackend
from transfer.backends.registry import make_backend
from workers.attention.interface import AttentionBackend
from workers.context_parallel.cost_model import ModelShape, Rates
from workers.device import Device, open_device
from workers.engine.calibration import measured_rates
from workers.engine.captures import Capture, capture_maker
from workers.engine.native_kernels import choose_kernels, num_helpers_of, start_helpers
from workers.engine.pool_memory import pool_memory_gib
from workers.engine.rank_groups import RankGroups, join_groups
from workers.engine.runner import ModelRunner
from workers.engine.warm_up import warm_up
from workers.engine.weights import load_model, torch_dtype
from workers.hicache.storage.weights_digest import weights_digest
from workers.memory.copy import PinnedMemory
from workers.memory.huge_pages import use_huge_pages, use_small_pages
from workers.memory.peer_memory import PeerMemory, open_peer_memory
from workers.models.decoder import DecoderModel
from workers.models.interface import DecoderConfig
from workers.models.registry import read_model_config
from workers.parallel.store import ReplicaStore, leave_store
from workers.trace.step_recorder import StepRecorder

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Parts of a worker that are loaded once and kept between runs."""

    geometry: KvGeometry
    layout: PoolLayout
    memory: PeerMemory
    """Page pool, and the memory through which peers access it."""
    backend: TransferBackend
    host_region: Region | None
    """Host memory for cached pages. None if no such memory is used."""
    weights: str
    """Digest of the weights, which is part of the keys of stored pages. Empty if no pages are stored."""
    model: DecoderModel
    runner: ModelRunner
    step_recorder: StepRecorder
    model_shape: ModelShape
    rates: Rates
    """Rates of the replica's slowest rank."""
    grammars: Grammars | None
    """Grammars that constrain sampling. None on ranks that do not sample."""
    groups: RankGroups
    pinned: PinnedMemory
    """Pinned host memory of both regions. Empty without a GPU."""
    stop_helpers: Callable[[], object]

    def close(self) -> None:
        """Release the transfer memory. Peers' writes fail from then on."""
        with ExitStack() as closing:  # closed in reverse order
            if self.grammars is not None:
                closing.callback(self.grammars.close)
            closing.callback(self.backend.close)
            closing.callback(self.pinned.close)
            closing.callback(self.stop_helpers)


def load_rank(spec: WorkerSpec, folder: Path, store: ReplicaStore) -> Rank:
    """Join the groups, load the weights, and allocate the pool. Every rank of the replica calls this."""
    with ExitStack() as on_failure:
        # After a failure, peers that wait for this rank to join or warm up fail immediately, not after the timeout.
        on_failure.callback(leave_store, store, spec.global_rank)
        # The device is opened before the groups, because only a rank with an open GPU can join them.
        device = open_device(spec.config.resources.device, spec.config.resources.gpus_per_worker)
        model_config = read_model_config(folder)
        model_config.check_layout(spec.pool.parallel, f"{spec.role}.parallel")
        model_config.check_ring(spec.config.prefill)
        groups = join_groups(spec, store, model_config, device)
        on_failure.callback(groups.leave)
        groups.connect(device)
        rank = _load(spec, folder, model_config, device, groups, store, on_failure)
        on_failure.pop_all()
    return rank


def _load(
    spec: WorkerSpec,
    folder: Path,
    model_config: DecoderConfig,
    device: Device,
    groups: RankGroups,
    store: ReplicaStore,
    on_failure: ExitStack,
) -> Rank:
    config = spec.config
    grammars = Grammars(folder, model_config.vocab_size) if groups.is_sampling_rank else None
    dtype_name = model_config.served_dtype(config.model)
    geometry = model_config.kv_geometry(config.model.name, dtype_name, config.kv.page_size)
    dtype = torch_dtype(dtype_name)
    model = load_model(folder, dtype=dtype, device=device, groups=groups.model)
    if grammars is not None:
        grammars.wait()  # it would disturb the measurements, and then hold up signs of life
    num_helpers = num_helpers_of(config.resources.attention, device, spec.world_size)
    attention = _open_attention(spec, model, geometry, num_helpers)
    limits = model_config.limits
    make_capture = capture_maker(device) if captures_decode(config, spec.pool, limits) else None
    memory_gib = pool_memory_gib(spec, store, model, attention, groups, geometry, make_capture)
    layout = _pool_layout(spec, geometry, memory_gib)
    backend = make_backend(config.transfer.backend, spec.host, config.transfer.protocol)
    memory, host_region, pinned = _open_memory(spec, layout, device, backend, groups)
    is_stored = host_region is not None and config.hicache.is_stored
    runner = ModelRunner(model, memory.pool, attention, groups, spec.ownership, grammars)
    warm_up(runner)
    on_failure.callback(runner.drop_graphs)
    _capture_decode(spec, runner, make_capture, why_not_captured(config, spec.pool, limits))
    shape, rates = measured_rates(spec, store, model, memory.pool, attention, groups, dtype_name)
    return Rank(
        geometry=geometry,
        layout=layout,
        memory=memory,
        backend=backend,
        host_region=host_region,
        weights=weights_digest(folder, CACHE_DIR.get() / "weights", model.products) if is_stored else "",
        model=model,
        runner=runner,
        step_recorder=StepRecorder(model, (groups.cp, *groups.pipeline.links)),
        model_shape=shape,
        rates=rates,
        grammars=grammars,
        groups=groups,
        pinned=pinned,
        stop_helpers=start_helpers(num_helpers, memory.pool.bytes),
    )


def _open_attention(spec: WorkerSpec, model: DecoderModel, geometry: KvGeometry, num_helpers: int) -> AttentionBackend:
    choice = choose_kernels(spec.config.resources.attention, model, geometry, num_helpers)
    _log.info("attention backend %s: %s", choice.name, choice.reason)
    return choice.backend


def _pool_layout(spec: WorkerSpec, geometry: KvGeometry, memory_gib: float) -> PoolLayout:
    layout = pool_layout(geometry, spec.sizes, spec.coords, memory_gib)
    _log.info("KV pool: %d pages, %d tokens", layout.num_pages, layout.tokens_in(layout.num_pages))
    return layout


def _open_memory(
    spec: WorkerSpec, layout: PoolLayout, device: Device, backend: TransferBackend, groups: RankGroups
) -> tuple[PeerMemory, Region | None, PinnedMemory]:
    """Allocate the pool and, if it is used, the host tier. Pin the regions of both for a GPU."""
    memory = open_peer_memory(layout, device, backend, spec.config.verify_by(), groups.head_copies)
    if not device.has_own_memory:
        use_huge_pages(memory.pool.bytes.data_ptr(), memory.pool.bytes.nbytes)
        use_small_pages()
    host_bytes = host_bytes_of(spec, layout)
    host_region = backend.allocate(host_bytes) if host_bytes else None
    to_pin = (memory.region, host_region) if device.is_asynchronous else ()
    return memory, host_region, PinnedMemory([each.buffer for each in to_pin if each and each.buffer.nbytes])


def _capture_decode(
    spec: WorkerSpec, runner: ModelRunner, make_capture: Callable[[], Capture] | None, reason: str
) -> None:
    """Capture decode steps, or log why they are not captured."""
    if make_capture is None:
        runner.why_not_captured = reason
    else:
        reason = runner.capture_decode(spec.config.decode.max_requests, make_capture())
    if reason:
        _log.info("decode steps are not captured: %s", reason)
    elif make_capture is not None:
        memory = f", in {runner.graph_bytes / GIB:.3g} GiB of GPU memory" if runner.graph_bytes else ""
        _log.info("decode steps are captured%s", memory)


def host_bytes_of(spec: WorkerSpec, layout: PoolLayout) -> int:
    """Return the bytes of host memory for cached pages: a multiple of the page size, 0 if nothing is cached."""
    if not spec.config.kv.prefix_cache:
        return 0
    return spec.config.hicache.host_bytes // layout.page_bytes * layout.page_bytes
