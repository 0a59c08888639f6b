"""What a rank asks of its machine before it meets others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.ids import Role
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.worker_specs import lone_worker
from workers import rank
from workers.parallel.groups import exchange


def test_a_machine_without_gpu_is_told_before_the_groups_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def join_groups(*_: object) -> None:
        raise AssertionError("NCCL needs the GPU")

    monkeypatch.setattr(rank, "join_groups", join_groups)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = DeployConfig.model_validate({"resources": {"device": "cuda"}})
    store: Any = HashStore()
    with pytest.raises(UserError, match=r"^resources\.device: got cuda, but torch "):
        rank.load_rank(lone_worker(config, Role.DECODE), make_checkpoint(tmp_path, "qwen3"), store)
    with pytest.raises(RuntimeError, match="rank 0 has left"):
        exchange(store, "here", 1, 2, "here")
