"""Whole start of a rank on a GPU of twins: weights, pool, warm-up and captures."""

from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.gpu_ranks import start_ranks_on
from tests.fakes.gpu_twin import twin_gpu
from tests.fakes.worker_specs import lone_worker
from workers import rank

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
        start_ranks_on(gpu, monkeypatch)
        loaded = rank.load_rank(spec, folder, store)
        graphs: Any = loaded.runner._graphs
        assert (list(graphs._steps) if graphs else []) == ([2, 1] if role is Role.DECODE else [])
        loaded.close()
