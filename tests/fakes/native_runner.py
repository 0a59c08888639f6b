"""Runner of a model on a CPU with native code, as in a worker."""

from pathlib import Path

import pytest
import torch

from cluster.spec.config import AttentionSetting
from workers.engine.native_kernels import choose_kernels
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model
from workers.kernels import elementwise
from workers.memory.page_pool import PagePool


def native_runner(
    patch: pytest.MonkeyPatch, folder: Path, dtype: torch.dtype, page_size: int, num_pages: int
) -> ModelRunner:
    """Load a model. Other models of this process use native code until the patch is undone."""
    patch.setattr(elementwise, "_REGISTERED", {})
    model = load_model(folder, dtype=dtype)
    geometry = model.config.kv_geometry("model", str(dtype).removeprefix("torch."), page_size)
    backend = choose_kernels(AttentionSetting.NATIVE, model, geometry).backend
    return ModelRunner(model, PagePool.of_one_rank(geometry, num_pages), backend, RankGroups())
