"""FP8 blocks have the same values on a GPU as on a CPU, in FP8 or dequantized: `pytest -m gpu tests/gpu`."""

from pathlib import Path

import pytest
import torch

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.fp8_checkpoints import Block, to_fp8_blocks
from tests.fakes.fp8_products import plain
from tests.fakes.loading_rank import groups_of
from tests.unit.workers.test_fp8_blocks import BLOCK, RAGGED
from workers.device import CPU, GPU
from workers.engine.weights import load_model
from workers.quant.fp8_matrix import Fp8Matrix

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block", [BLOCK, (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_those_on_a_cpu(tmp_path: Path, dtype: torch.dtype, block: Block) -> None:
    folder = to_fp8_blocks(make_checkpoint(tmp_path, "qwen3_moe", **RAGGED["qwen3_moe"]), block)
    for rank in range(2):
        on_gpu, on_cpu = (
            load_model(folder, dtype=dtype, device=device, groups=groups_of({"tp": 2, "ep": 2}, rank)).weights()
            for device in (GPU, CPU)
        )
        assert any(isinstance(shard.target, Fp8Matrix) for shard in on_gpu.values()) == (block != BLOCK)
        for name, shard in on_gpu.items():
            assert torch.equal(plain(shard.target).to(dtype).cpu(), on_cpu[name].plain), name
