"""Weights that stay in FP8 have the values of dequantized ones, in shards of every layout."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.linear_shards import LinearShards
from cluster.spec.strategy import ShardLinear
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.fp8_checkpoints import Block, dequantized, quantized, to_fp8_blocks
from tests.fakes.fp8_products import plain
from tests.fakes.loading_rank import groups_of
from tests.unit.workers.test_fp8_blocks import RAGGED
from workers.device import CPU, GPU, GpuDevice
from workers.engine.weights import load_model
from workers.models.decoder import DecoderModel
from workers.quant.fp8_blocks import Fp8Blocks
from workers.quant.fp8_matrix import Fp8Matrix
from workers.quant.interface import Index

WIDE = (32, 32)
"""Blocks that are as narrow as products in FP8 allow."""


@pytest.mark.parametrize(
    ("of_block", "columns", "start", "size", "width"),
    [
        (128, 4096, 0, 4096, 128),
        (128, 4100, 0, 4100, 128),  # whole: only the last group is partial
        (128, 72, 0, 72, 72),
        (128, 768, 192, 192, 64),
        (128, 768, 96, 96, 32),
        (128, 768, 0, 48, None),  # like the other ranks, whose inputs begin within a block
        (128, 768, 48, 48, None),
        (128, 16, 0, 16, None),
        (256, 1024, 0, 1024, 128),
        (96, 960, 480, 480, 96),
        (16, 4096, 0, 4096, None),
    ],
)
def test_groups_are_as_wide_as_blocks_and_shards_allow(
    of_block: int, columns: int, start: int, size: int, width: int | None
) -> None:
    assert Fp8Blocks(64, of_block).fp8_width(columns, start, size) == width
    assert Fp8Blocks(64, of_block).weight("w", (8, columns), "F8_E4M3").fp8_width(start, size) == width
    assert Fp8Blocks(64, of_block).weight("w", (8, columns), "BF16").fp8_width(start, size) is None


@given(
    shape=st.tuples(st.integers(1, 90), st.integers(32, 400)),
    block=st.tuples(st.integers(1, 50), st.sampled_from([32, 48, 64, 128, 256])),
    rows=st.tuples(st.integers(0, 90), st.integers(0, 90)),
    part=st.sampled_from([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]),
)
def test_any_shard_of_a_weight_has_the_defined_values(
    shape: tuple[int, int], block: Block, rows: tuple[int, int], part: tuple[int, int]
) -> None:
    """Elements beyond the weight are zeros."""
    weight, scales = quantized(torch.randn(shape, generator=torch.Generator().manual_seed(0)), block)
    stored = {"w": weight, "w_scale_inv": scales}
    of_weight = Fp8Blocks(*block).weight("w", shape, "F8_E4M3")
    at, count = part
    size = -(-shape[1] // count)
    width = of_weight.fp8_width(at * size, size)
    if width is None:
        return
    begin, end = sorted(min(row, shape[0]) for row in rows)
    columns = slice(min(at * size, shape[1]), min((at + 1) * size, shape[1]))
    target = Fp8Matrix.empty((end - begin + 1, size), width, CPU.torch_device)
    target.values.view(torch.uint8).fill_(0x7F)
    target.scales.fill_(torch.nan)

    def read(name: str, index: Index) -> Tensor:
        return stored[name][index]

    of_weight.load((slice(begin, end), columns), target.cleared((end - begin, columns.stop - columns.start)), read)
    expected = torch.zeros(target.shape)
    expected[:-1, : columns.stop - columns.start] = dequantized(weight, scales, block)[begin:end, columns]
    assert torch.equal(plain(target), expected)


def loaded(folder: Path, axes: dict[str, int], patch: pytest.MonkeyPatch, *, keeps_fp8: bool) -> list[DecoderModel]:
    """Return the model of every rank."""
    patch.setattr(CPU, "multiplies_fp8", keeps_fp8)
    return [load_model(folder, groups=groups_of(axes, rank)) for rank in range(prod(axes.values()))]


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"tp": 4}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("block", [WIDE, (128, 128), (24, 48)], ids=str)
@pytest.mark.parametrize("family", RAGGED)
def test_every_rank_has_the_values_of_the_dequantized_model(
    tmp_path: Path, family: str, axes: dict[str, int], block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some projections are stored in fp32, so that the matrices that contain them are dequantized."""
    kept = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
    folder = to_fp8_blocks(make_checkpoint(tmp_path, family, **RAGGED[family]), block, kept=kept, num_files=3)
    ours, expected = (loaded(folder, axes, monkeypatch, keeps_fp8=keeps_fp8) for keeps_fp8 in (True, False))
    for model, dequantized_model in zip(ours, expected, strict=True):
        wanted = dequantized_model.weights()
        assert model.weights().keys() == wanted.keys()
        for name, shard in model.weights().items():
            assert torch.equal(plain(shard.target), wanted[name].plain), name
            assert isinstance(shard.target, Tensor) or name.removesuffix(".weight") not in kept
        assert 0 < model.fp8_bytes < 2 * sum(shard.plain.numel() for shard in wanted.values())
        assert dequantized_model.fp8_bytes == 0
        assert (model.products, dequantized_model.products) == ("fp8", "")
        model.groups = replace(model.groups, linear_shards=LinearShards(ShardLinear.GATHER, 2))
        assert model.products == "fp8, without projections"


def in_fp8(model: DecoderModel) -> dict[str, int]:
    """Return the widths of groups by the names of weights in FP8, without layers and experts other than the first."""
    return {
        name.removeprefix("model.layers.").removesuffix(".weight"): shard.target.width
        for name, shard in model.weights().items()
        if isinstance(shard.target, Fp8Matrix) and (".experts." not in name or ".experts.0." in name)
    }


def test_matrices_that_are_only_multiplied_stay_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kv_b_proj is also used as a matrix for each head, and with tp 2 some inputs are too narrow."""
    shape: dict[str, Any] = {"q_lora_rank": 40, "moe_intermediate_size": 40, "num_hidden_layers": 2}
    folder = to_fp8_blocks(make_checkpoint(tmp_path, "deepseek_v32", **shape), (128, 128))
    whole, half = (loaded(folder, axes, monkeypatch, keeps_fp8=True)[0] for axes in ({}, {"tp": 2}))
    attention = {"q_a_proj": 64, "kv_a_proj_with_mqa": 64, "q_b_proj": 40, "o_proj": 40}
    both = {f"{layer}.self_attn.{name}": width for layer in (0, 1) for name, width in attention.items()}
    wide = ("0.mlp", "1.mlp.experts.0", "1.mlp.shared_experts")
    both |= {f"{mlp}.{name}": 64 for mlp in wide for name in ("gate_proj", "up_proj")}
    down = {f"{mlp}.down_proj": 40 for mlp in wide}
    assert in_fp8(whole) == both | down | {"0.mlp.down_proj": 96}
    narrow = {name: width for name, width in both.items() if not name.endswith("o_proj")}
    assert in_fp8(half) == narrow | {"0.mlp.down_proj": 48}


def test_one_plain_part_dequantizes_its_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ["model.layers.0.self_attn.k_proj", "model.layers.0.mlp.experts.1.up_proj"]
    folder = to_fp8_blocks(make_checkpoint(tmp_path, "qwen3_moe"), WIDE, kept=kept)
    (model,) = loaded(folder, {}, monkeypatch, keeps_fp8=True)
    held, parts = in_fp8(model), {f"self_attn.{name}_proj" for name in "qkvo"}
    parts |= {f"mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")}
    gone = {f"0.self_attn.{name}_proj" for name in "qkv"} | {f"0.mlp.experts.0.{name}_proj" for name in ("gate", "up")}
    assert held.keys() == {f"{layer}.{part}" for layer in (0, 1) for part in parts} - gone


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_gpus_before_ada_dequantize(
    capability: tuple[int, int], has_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuDevice, "compute_capability", capability)
    assert GPU.multiplies_fp8 == has_fp8
    assert not CPU.multiplies_fp8
