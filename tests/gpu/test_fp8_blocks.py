"""FP8 blocks that are dequantized on a GPU have the same values as on a CPU: `pytest -m gpu tests/gpu`."""

from pathlib import Path

import pytest
import torch

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.fp8_checkpoints import to_fp8_blocks
from tests.fakes.loading_rank import groups_of
from tests.unit.workers.test_fp8_blocks import BLOCK, RAGGED
from workers.device import CPU, GPU
from workers.engine.weights import load_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_those_on_a_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = to_fp8_blocks(make_checkpoint(tmp_path, "qwen3_moe", **RAGGED["qwen3_moe"]), BLOCK)
    for rank in range(2):
        on_gpu, on_cpu = (
            load_model(folder, dtype=dtype, device=device, groups=groups_of({"tp": 2, "ep": 2}, rank)).weights()
            for device in (GPU, CPU)
        )
        assert all(torch.equal(shard.target.cpu(), on_cpu[name].target) for name, shard in on_gpu.items())
