"""The device side of one worker: model, groups, page pool in transfer memory, and the runner over them."""

from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.grammar import Grammars
from cluster.spec.config import Device
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.lifecycle import Role
from cluster.spec.pool import pool_layout
from cluster.spec.ranks import GroupName, groups
from cluster.spec.worker_spec import WorkerSpec
from transfer.backends.interface import Region, TransferBackend, make_backend
from workers.attention.registry import fastest_backend
from workers.cache.page_pool import PagePool
from workers.context_parallel.rates import ModelShape, Rates
from workers.engine.calibration import calibrate
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model, torch_dtype
from workers.models.config import ModelConfig
from workers.parallel.collectives import Communicator
from workers.parallel.groups import ReplicaStore, join_group
from workers.step_recorder import StepRecorder

COLLECTIVE_TIMEOUT_S = 3600.0
"""A dead peer closes its connections and is seen at once; this only bounds a peer that is stopped but not dead."""

CHECKED_TIMEOUT_S = 60.0
"""The same while collectives are checked: a rank that does not come at all is what is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Everything of one worker that lives as long as its process."""

    geometry: KvGeometry
    layout: PoolLayout
    region: Region
    backend: TransferBackend
    runner: ModelRunner
    step_recorder: StepRecorder
    model_shape: ModelShape
    rates: Rates
    """As this rank measured them; on decode, where nothing is chosen by them, the defaults."""
    grammars: Grammars | None
    """Where tokens are drawn."""

    cp_group: Communicator
    tp_group: Communicator

    def leave(self) -> None:
        """Leave the groups; peers that wait for this rank fail."""
        self.cp_group.destroy()
        self.tp_group.destroy()

    def close(self) -> None:
        """Give back transfer memory; peers that write from now on fail."""
        self.backend.close()
        if self.grammars is not None:
            self.grammars.close()


def load_rank(spec: WorkerSpec, folder: Path, store: ReplicaStore) -> Rank:
    """Join the groups, load the weights, allocate the pool. Every rank of the replica calls this."""
    cp_group, tp_group = (_join(spec, store, name) for name in (GroupName.ATTN_CP, GroupName.ATTN_TP))
    try:
        return _load(spec, folder, cp_group, tp_group)
    except BaseException:
        # Peers that wait for this rank while they warm up end now, instead of after the timeout.
        cp_group.destroy()
        tp_group.destroy()
        raise


def _load(spec: WorkerSpec, folder: Path, cp_group: Communicator, tp_group: Communicator) -> Rank:
    config = spec.config
    device = torch.device("cpu" if config.resources.device is Device.CPU else "cuda")
    model_config = ModelConfig.from_folder(folder)
    draws = cp_group.rank == tp_group.rank == 0
    grammars = Grammars(folder, model_config.vocab_size) if draws else None
    dtype = model_config.dtype if config.model.dtype == "auto" else config.model.dtype
    geometry = KvGeometry(
        model=config.model.name,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=dtype,
        page_size=config.kv.page_size,
    )
    layout = pool_layout(geometry, spec.sizes, spec.coords, config.kv_memory_gib(spec.pool))
    backend = make_backend(config.transfer.backend, spec.host)
    region = backend.allocate(layout.pool_bytes)
    pool = PagePool(
        layout.num_pages,
        layout.num_heads,
        layout.num_layers,
        layout.page_size,
        layout.head_dim,
        torch_dtype(dtype),
        torch.frombuffer(region.buffer, dtype=torch.uint8),
    )
    model = load_model(folder, dtype=torch_dtype(dtype), device=device, group=tp_group)
    attention = fastest_backend(device, torch_dtype(dtype))
    runner = ModelRunner(model, pool, attention, cp_group, spec.ownership, grammars)
    runner.warm_up()
    shape = ModelShape.of(model.config, dtype)
    rates = calibrate(model, pool, attention, cp_group, shape) if spec.role is Role.PREFILL else Rates()
    return Rank(
        geometry=geometry,
        layout=layout,
        region=region,
        backend=backend,
        runner=runner,
        step_recorder=StepRecorder(model, cp_group),
        model_shape=shape,
        rates=rates,
        grammars=grammars,
        cp_group=cp_group,
        tp_group=tp_group,
    )


def _join(spec: WorkerSpec, store: ReplicaStore, name: GroupName) -> Communicator:
    """Meet the other ranks of this worker's group of a name."""
    members = next(group for group in groups(spec.pool.parallel)[name] if spec.global_rank in group)
    check = spec.config.resources.check_collectives
    return join_group(
        store,
        f"{name}/{members[0]}",
        members,
        spec.global_rank,
        host=spec.host,
        timeout_s=CHECKED_TIMEOUT_S if check else COLLECTIVE_TIMEOUT_S,
        collectives=spec.config.resources.collectives,
        check=check,
    )
