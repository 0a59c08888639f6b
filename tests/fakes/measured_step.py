"""Process that runs one prefill step as one CP rank and reports its memory: python -m tests.fakes.measured_step JSON

All tokens are in the null page, so that a long prefix costs nothing.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from cluster.planner.model import facts_of
from cluster.spec.config import AttentionSetting, DeployConfig
from cluster.spec.ids import Role
from cluster.spec.kv import KvGeometry
from cluster.spec.memory import pool_layout
from cluster.spec.strategy import Passing
from cluster.spec.worker_spec import WorkerSpec
from tests.fakes.worker_specs import worker_of
from workers.device import CPU
from workers.engine.native_kernels import choose_kernels
from workers.engine.rank_groups import join_groups
from workers.engine.runner import ModelRunner
from workers.engine.warm_up import warm_up
from workers.engine.weights import load_model
from workers.memory.page_pool import PagePool
from workers.models.registry import read_model_config
from workers.native.library import Library
from workers.parallel.store import join_store, open_store

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of mallopt(3)."""
_START_S = 120.0


def main(*, folder: str, settings: dict[str, Any], rank: int, store: str, **step: Any) -> None:
    """Print the bytes of weights and pages, and of a step.

    The first rank opens the store through which ranks meet, and prints its address.
    """
    spec = worker_of(DeployConfig.model_validate(settings), Role.PREFILL, rank)
    # Tensors get memory of their own, which returns to the system with them, so that the peak is that of the tensors.
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_TRIM_THRESHOLD, 0)
    Library.load()  # so that its memory does not count
    if not rank:
        opened, port = open_store(spec.host, _START_S)
        print(f"{spec.host}:{port}", flush=True)
    before = _status("VmRSS")
    meeting = join_store(store, _START_S) if rank else opened
    groups = join_groups(spec, meeting, read_model_config(Path(folder)), CPU)
    model = load_model(Path(folder), groups=groups.model)
    geometry = facts_of(spec.config, Path(folder)).geometry
    attention = choose_kernels(AttentionSetting.NATIVE, model, geometry).backend
    runner = ModelRunner(model, _pool(spec, geometry), attention, groups, spec.ownership)
    warm_up(runner)
    runner.run_dummy(1024, 1024)  # libraries allocate buffers for large products
    held = _status("VmRSS")
    # Writing 5 sets the peak to the present value.
    Path("/proc/self/clear_refs").write_text("5")
    _run(runner, spec, **step)
    print(json.dumps({"held": held - before, "step": _status("VmHWM") - held}))
    groups.leave()


def _pool(spec: WorkerSpec, geometry: KvGeometry) -> PagePool:
    """Return a pool of random KV."""
    assert spec.config.kv_memory_gib is not None, "a CPU has no default"
    pool = PagePool(pool_layout(geometry, spec.sizes, spec.coords, spec.config.kv_memory_gib or 0.0))
    for layer in range(geometry.num_layers):
        for part in pool.layer_view(layer):
            part.normal_()
    return pool


def _run(
    runner: ModelRunner,
    spec: WorkerSpec,
    num_requests: int,
    extend_len: int,
    prefix_len: int,
    passing: str | None,
) -> None:
    strategy = spec.config.prefill.strategy.fullest
    runner.run_dummy(extend_len, prefix_len, strategy, Passing(passing) if passing else None, num_requests)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
