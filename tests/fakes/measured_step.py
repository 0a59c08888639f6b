"""Process that runs one prefill step and reports its memory: python -m tests.fakes.measured_step JSON

Pages hold random numbers, so that a long prefix costs nothing.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.planner.model import facts_of
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.memory import pool_layout
from cluster.spec.ranks import positions, sizes_of
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan
from workers.attention.native_backend import NativeAttention
from workers.context_parallel.shard_plan import make_step_shape
from workers.device import CPU
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model
from workers.kernels import elementwise
from workers.memory.page_pool import PagePool
from workers.native.library import Library

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of mallopt(3)."""


def main(folder: str, settings: dict[str, Any], extend_lens: list[int], prefix_len: int) -> None:
    """Print the bytes of weights and pages, and of a step of requests with prefixes of equal lengths."""
    config = DeployConfig.model_validate(settings)
    # Tensors get memory of their own, which returns to the system with them, so that the peak is that of the tensors.
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_TRIM_THRESHOLD, 0)
    attention, library = NativeAttention(), Library.load()
    elementwise.register(CPU, torch.float32, library)
    before = _status("VmRSS")
    runner = _runner(Path(folder), config, attention)
    runner.warm_up()
    runner.run_dummy(1024, 1024)  # libraries allocate buffers for large products
    held = _status("VmRSS")
    # Writing 5 sets the peak to the present value.
    Path("/proc/self/clear_refs").write_text("5")
    runner.execute(_plan(config, extend_lens, prefix_len))
    print(json.dumps({"held": held - before, "step": _status("VmHWM") - held}))


def _runner(folder: Path, config: DeployConfig, attention: NativeAttention) -> ModelRunner:
    model, sizes = load_model(folder), sizes_of(config.prefill.parallel)
    geometry, coords = facts_of(config, folder).geometry, positions(config.prefill.parallel)[0].coords
    assert config.kv_memory_gib is not None, "a CPU has no default"
    pool = PagePool(pool_layout(geometry, sizes, coords, config.kv_memory_gib))
    for layer in range(geometry.num_layers):
        for part in pool.layer_view(layer):
            part.normal_()
    return ModelRunner(model, pool, attention, RankGroups())


def _plan(config: DeployConfig, extend_lens: list[int], prefix_len: int) -> StepPlan:
    rng, first_page = np.random.default_rng(1), 0
    new_requests, scheduled = list[NewRequest](), list[ScheduledRequest]()
    for number, count in enumerate(extend_lens):
        num_pages = pages_for(prefix_len + count, config.kv.page_size)
        pages = list(range(first_page, first_page + num_pages))
        first_page += num_pages
        room, prompt_len = Room(number), prefix_len + count
        new_requests.append(
            NewRequest(room=room, prompt_len=prompt_len, owner_base=0, sampling=Sampling(), destination=None)
        )
        scheduled.append(
            ScheduledRequest(
                room=room,
                first_position=prefix_len,
                token_ids=rng.integers(3, 250, count).tolist(),
                new_pages=[pages],
                samples=True,
                output_position=0,
            )
        )
    shape = make_step_shape(scheduled)
    return StepPlan(step=1, shape=shape, new_requests=new_requests, scheduled=scheduled, releases=[])


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
