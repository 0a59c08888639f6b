"""Models that keep weights in FP8 compared with dequantized ones whose activations are rounded in plain torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.counted_launches import CountedLaunches
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import kernels_on_cpu
from tests.fakes.fp8_checkpoints import Block, to_fp8_blocks
from tests.fakes.fp8_products import rounded_rows
from workers.device import CPU
from workers.engine.weights import load_model
from workers.layers import feed_forward, linear, matmul
from workers.models.decoder import DecoderModel
from workers.quant.fp8_matrix import Fp8Matrix

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 72, "intermediate_size": 101},
    "qwen3_moe": {"hidden_size": 72, "moe_intermediate_size": 52},
    "deepseek_v3": {
        "hidden_size": 72,
        "q_lora_rank": 40,
        "intermediate_size": 101,
        "moe_intermediate_size": 44,
        "num_hidden_layers": 2,
    },
}
PROMPT = torch.randint(0, 256, (10,), generator=torch.Generator().manual_seed(1))


def logits_of(model: DecoderModel) -> Tensor:
    """Return the logits of a prompt in two chunks, and of no tokens."""
    context = DenseAttention()
    parts, positions = (slice(8), slice(8, 10)), torch.arange(len(PROMPT))
    logits = torch.cat([model.logits(model(PROMPT[part], positions[part], context)) for part in parts])
    assert model.logits(model(PROMPT[:0], positions[:0], DenseAttention())).shape == (0, 256)
    return logits


def widths_of(model: DecoderModel) -> dict[tuple[str, str], int]:
    """Return the width of each matrix in FP8, by the path of its layer and its name."""
    return {
        (path, name): matrix.width
        for path, layer in model.named_modules()
        for name, matrix in vars(layer).items()
        if isinstance(matrix, Fp8Matrix)
    }


def rounding(model: DecoderModel, widths: Mapping[tuple[str, str], int]) -> Callable[..., Tensor]:
    """Return ``multiply`` for a dequantized model, with activations rounded to FP8 wherever weights could be in it."""
    multiply = matmul.multiply
    of_memory = {
        getattr(model.get_submodule(path), name).untyped_storage().data_ptr(): width
        for (path, name), width in widths.items()
    }

    def multiply_rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        width = of_memory.get(weight.untyped_storage().data_ptr())
        return multiply(x if width is None else rounded_rows(x, width).to(x.dtype), weight, bias)

    return multiply_rounded


@pytest.mark.parametrize("block", [pytest.param((32, 32), marks=pytest.mark.full), (128, 128)], ids=str)
@pytest.mark.parametrize("family", SHAPES)
def test_logits(family: str, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few activations may be rounded to the other neighbour, but far fewer than all."""
    folder = to_fp8_blocks(make_checkpoint(tmp_path, family, **SHAPES[family]), block)
    with torch.inference_mode():
        plain = load_model(folder)
        exact = logits_of(plain)
        with monkeypatch.context() as patch:
            kernels_on_cpu(patch)
            patch.setattr(CPU, "multiplies_fp8", True)
            model = load_model(folder)
            assert all(isinstance(shard.target, Fp8Matrix) for shard in model.weights().values() if shard.matrix)
            found = logits_of(model)
        for module in (linear, feed_forward):
            monkeypatch.setattr(module, "multiply", rounding(plain, widths_of(model)))
        expected = logits_of(plain)
    scale = expected.norm()
    assert (exact - expected).norm() > 0.02 * scale
    assert (found - expected).norm() < 0.001 * scale


def test_products_are_two_launches_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for num_layers in (1, 2):
        folder = make_checkpoint(tmp_path / str(num_layers), "qwen3", num_hidden_layers=num_layers)
        to_fp8_blocks(folder, (128, 128))
        with torch.inference_mode(), monkeypatch.context() as patch:
            kernels_on_cpu(patch)
            patch.setattr(CPU, "multiplies_fp8", True)
            model, launches = load_model(folder), CountedLaunches(patch)
            with launches:
                model(PROMPT[:1], torch.arange(1), DenseAttention())
        counts.append(launches.counts)
    of_layer = counts[1] - counts[0]
    assert of_layer["_quantize_kernel"] == of_layer["_matmul_kernel"] == 4
    assert "linear" not in of_layer
