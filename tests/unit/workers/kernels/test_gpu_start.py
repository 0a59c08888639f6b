"""Whole start of a rank on a GPU of twins: weights, pool, warm-up and captures."""

from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.gpu_twin import twin_gpu
from tests.fakes.worker_specs import lone_worker
from workers import rank
from workers.attention.registry import BackendChoice
from workers.attention.triton.backend import TritonAttention
from workers.engine import native_kernels, warm_up
from workers.memory.copy import PinnedMemory

CONFIG = {
    "resources": {"device": "cuda"},
    "model": {"max_context": 64, "dtype": "float32"},
    "kv": {"memory_gib": 0.001, "page_size": 8},
    "prefill": {"chunk_tokens": 32, "max_requests": 4},
    "decode": {"chunk_tokens": 32, "max_requests": 2},
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_rank_starts_on_a_gpu(family: str, role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, family, num_hidden_layers=2)
    store: Any = HashStore()
    spec = lone_worker(DeployConfig.model_validate(CONFIG), role)
    with twin_gpu() as gpu:
        monkeypatch.setattr(rank, "open_device", lambda *_: gpu)
        monkeypatch.setattr(rank, "capture_maker", lambda _: lambda: gpu.capture)
        monkeypatch.setattr(rank, "PinnedMemory", lambda _: PinnedMemory([]))
        monkeypatch.setattr(native_kernels, "choose_backend", lambda *_: BackendChoice("triton", TritonAttention(), ""))
        monkeypatch.setattr(rank, "measured_rates", lambda *_: (None, None))
        monkeypatch.setattr(warm_up, "KERNEL_STEPS", [(1, 0), (2, 16)])
        loaded = rank.load_rank(spec, folder, store)
        graphs: Any = loaded.runner._graphs
        assert (list(graphs._steps) if graphs else []) == ([2, 1] if role is Role.DECODE else [])
        loaded.close()
