"""FP8 blocks compared with transformers and with their definition, whole and in shards of every layout."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.config import ParallelConfig
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.fp8_checkpoints import (
    FP8,
    dequantized,
    quantized,
    quantized_by_transformers,
    tensors_in,
    to_fp8_blocks,
    to_plain,
    transformers_model,
)
from tests.fakes.generation import generate
from tests.fakes.loading_rank import groups_of
from tests.fakes.stable_ties import break_ties_by_position
from tests.fakes.thread_layout import on_thread_layout
from tests.unit.workers.test_weights import Reads
from workers.device import CPU
from workers.engine.weights import check_weights, load_model
from workers.models.decoder import DecoderModel
from workers.parallel.model_groups import ModelGroups
from workers.quant import fp8_blocks
from workers.quant.fp8_blocks import Fp8Blocks
from workers.quant.interface import Index

BLOCK = (32, 16)
DIVIDED: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "deepseek_v3": {"q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 64},
}
"""Models whose weights consist of whole blocks, which transformers requires. Their shards do not."""
RAGGED: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 72, "intermediate_size": 101},
    "qwen3_moe": {"hidden_size": 72, "moe_intermediate_size": 52},
    "deepseek_v3": {"hidden_size": 72, "intermediate_size": 101, "moe_intermediate_size": 44},
}
"""Models with partial blocks in the last rows and columns."""
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "v_head_dim": 16,
    "index_head_dim": 32,
    "first_k_dense_replace": 4,
}
WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "glm_moe_dsa": LATENT,
}
"""Models whose weights consist of whole blocks, without experts, whose scales transformers cannot read."""
IN_FP8 = tuple(
    f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)
IN_FP8 += tuple(f"{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk"))
PROMPT = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(1))
NUM_TOKENS = 8


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep bf16 weights as they were loaded, which the tests compare; some CPUs need them rearranged."""
    monkeypatch.setattr(CPU, "packs_bf16", False)


def layouts_of(family: str) -> list[dict[str, int]]:
    """Return some layouts in which each rank has a shard of rows, of columns or of the experts."""
    dense = [{"tp": 1}, {"tp": 2}]
    return dense if family == "qwen3" else [*dense, {"tp": 2, "ep": 2}]


@st.composite
def pieces(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int], tuple[slice, slice], int]:
    """Draw the sizes of a weight and of its blocks, a piece of the weight, and a number of elements per strip."""
    sizes = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in sizes]
    block = draw(st.integers(1, 50)), draw(st.integers(1, 50))
    return sizes, block, (slice(*bounds[0]), slice(*bounds[1])), draw(st.integers(1, 400))


@given(pieces(), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_piece_of_a_weight_has_the_defined_values(
    piece: tuple[tuple[int, int], tuple[int, int], tuple[slice, slice], int],
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    sizes, block, index, strip_size = piece
    weight, scales = quantized(torch.randn(sizes, generator=torch.Generator().manual_seed(0)), block, scale_dtype)
    stored, reads = {"w": weight, "w_scale_inv": scales}, Counter[str]()

    def read(name: str, part: Index) -> Tensor:
        reads[name] += stored[name][part].numel()
        width, height = part[1].stop - part[1].start, min(block[0], sizes[0])
        assert name != "w" or stored[name][part].numel() <= max(strip_size, width * height)
        return stored[name][part]

    weight_in_blocks = Fp8Blocks(*block).weight("w", sizes, "F8_E4M3")
    assert {name: spec.shape for name, spec in weight_in_blocks.tensors().items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    expected = dequantized(weight, scales, block)[index].to(dtype)
    target = torch.full_like(expected, torch.nan)
    with patch.object(fp8_blocks, "_STRIP_SIZE", strip_size):
        weight_in_blocks.load(index, target, read)
    assert torch.equal(target, expected)
    met = [
        {element // size for element in range(part.start, part.stop)} for part, size in zip(index, block, strict=True)
    ]
    assert reads["w"] == target.numel()
    assert not target.numel() or reads["w_scale_inv"] == len(met[0]) * len(met[1])


def loaded(model: DecoderModel) -> dict[str, Tensor]:
    return {name: shard.plain for name, shard in model.weights().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", DIVIDED)
def test_values_equal_transformers_bit_by_bit(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = to_fp8_blocks(make_checkpoint(tmp_path, family, dtype=dtype, **DIVIDED[family]), BLOCK)
    ours, theirs = loaded(load_model(folder, dtype=dtype)), transformers_model(folder, dtype).state_dict()
    for name, value in theirs.items():
        experts, _, kind = name.rpartition(".")
        for expert, part in enumerate(value) if experts.endswith(".experts") else [(None, value)]:
            if expert is None:
                assert torch.equal(ours.pop(name), part), name
            else:
                kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
                found = [ours.pop(f"{experts}.{expert}.{kind}.weight") for kind in kinds]
                assert torch.equal(torch.cat(found), part), name
    assert not ours, "transformers has all weights"


@torch.inference_mode()
def answer(groups: ModelGroups, folder: Path) -> tuple[Tensor, list[int]]:
    """Return one rank's logits of the prompt, and its greedy tokens."""
    model, context, tokens = load_model(folder, groups=groups), DenseAttention(), PROMPT
    prompt_logits, output = torch.empty(0), list[int]()
    for _ in range(NUM_TOKENS):
        start = len(PROMPT) + len(output) - len(tokens)
        logits = model.logits(model(tokens, torch.arange(start, start + len(tokens)), context))
        prompt_logits = prompt_logits if output else logits
        output.append(int(logits[-1].argmax()))
        tokens = torch.tensor(output[-1:])
    return prompt_logits, output


@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
@torch.inference_mode()
def test_what_transformers_writes_loads_to_the_logits_of_what_it_reads(tmp_path: Path, family: str) -> None:
    plain = make_checkpoint(tmp_path / "plain", family, **WITHOUT_EXPERTS[family])
    folder = quantized_by_transformers(plain, tmp_path / "fp8", BLOCK)
    theirs, model = transformers_model(folder), load_model(folder)
    break_ties_by_position(theirs)
    expected = theirs(PROMPT[None]).logits[0]
    logits = model.logits(model(PROMPT, torch.arange(len(PROMPT)), DenseAttention()))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    in_fp8 = {name for name, tensor in tensors_in(folder).items() if tensor.dtype == FP8}
    assert in_fp8 == {name for name in tensors_in(plain) if name.endswith(IN_FP8)}


@pytest.mark.parametrize(
    ("family", "axes"), [(family, axes) for family in DIVIDED for axes in layouts_of(family)], ids=str
)
def test_logits_and_tokens_equal_transformers(tmp_path: Path, family: str, axes: dict[str, int]) -> None:
    folder = to_fp8_blocks(make_checkpoint(tmp_path, family, **DIVIDED[family]), BLOCK)
    with torch.inference_mode():
        theirs = transformers_model(folder)
        expected = theirs(PROMPT[None]).logits[0]
        tokens = generate(theirs, PROMPT, NUM_TOKENS)[len(PROMPT) :].tolist()
    assert expected.std() > 1, "logits must be spread for this comparison to mean anything"
    for logits, output in on_thread_layout(ParallelConfig(**axes), partial(answer, folder=folder)):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert output == tokens


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"tp": 4}, {"tp": 4, "ep": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", RAGGED)
def test_partial_blocks_and_plain_weights_load_on_every_rank(
    tmp_path: Path, family: str, axes: dict[str, int], scale_dtype: torch.dtype
) -> None:
    """Scales are in other files than their weights, and some projections stay in bf16."""
    if family == "qwen3" and "ep" in axes:
        axes = {"tp": 2, "pp": 2}
    kept = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
    folder = make_checkpoint(tmp_path / "fp8", family, dtype=torch.bfloat16, **RAGGED[family])
    to_fp8_blocks(folder, BLOCK, kept=kept, scale_dtype=scale_dtype, num_files=3)
    check_weights(folder)
    plain = to_plain(folder, tmp_path / "plain", BLOCK)
    for rank in range(axes.get("tp", 1) * axes.get("pp", 1)):
        groups = groups_of(axes, rank)
        for dtype in (torch.float32, torch.bfloat16):
            ours, expected = (loaded(load_model(path, dtype=dtype, groups=groups)) for path in (folder, plain))
            assert ours.keys() == expected.keys()
            assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_each_rank_reads_only_its_rows_columns_and_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = to_fp8_blocks(make_checkpoint(tmp_path, "qwen3_moe", **RAGGED["qwen3_moe"]), BLOCK)
    stored, reads = tensors_in(folder), Reads(monkeypatch)
    for rank in range(4):
        load_model(folder, groups=groups_of({"tp": 4, "ep": 2}, rank))
    for name, tensor in stored.items():
        if ".experts." in name and name.endswith(".weight"):
            assert reads.elements[name] == tensor.numel(), name
    experts = "model.layers.0.mlp.experts.5"
    # The ranks' 26 rows of gate and columns of down meet 1 + 1 blocks of rows, and 2 + 3 blocks of columns.
    assert stored[f"{experts}.gate_proj.weight_scale_inv"].shape == (2, 5)
    assert reads.elements[f"{experts}.gate_proj.weight_scale_inv"] == (1 + 2) * 5
    assert stored[f"{experts}.down_proj.weight_scale_inv"].shape == (3, 4)
    assert reads.elements[f"{experts}.down_proj.weight_scale_inv"] == 3 * (2 + 3)
