"""Checkpoints in other formats than plain numbers and FP8 blocks are refused in one line, before anything starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.fp8_checkpoints import edit_config, save, tensors_in, to_fp8_blocks
from workers.engine.checkpoint_files import CheckpointError
from workers.engine.weights import check_weights, load_model
from workers.models.interface import UnsupportedModelError
from workers.models.registry import read_model_config
from workers.quant.fp8_blocks import Fp8Blocks

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return to_fp8_blocks(make_checkpoint(tmp_path, "qwen3"), (32, 16), kept=[f"{LAYER}.self_attn.q_proj"])


@pytest.mark.parametrize(
    "extra",
    [
        {"fmt": "float8_e4m3fn", "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]},
        {"act_per_tensor": False, "kv_cache_scheme": None, "ignored_layers": None},
    ],
)
def test_settings_of_published_checkpoints_are_accepted(folder: Path, extra: dict[str, Any]) -> None:
    edit_config(folder, quantization_config=FP8 | extra)
    assert read_model_config(folder).weight_format == Fp8Blocks(128, 128)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        *(
            ({"quant_method": method}, f"quant_method is {method!r}; allowed: 'fp8', or an unquantized checkpoint")
            for method in (
                "compressed-tensors",
                "modelopt",
                "awq",
                "gptq",
                "mxfp4",
                "nvfp4",
                "bitsandbytes",
                "fbgemm_fp8",
            )
        ),
        ({"load_in_4bit": True}, "quant_method is None; allowed"),
        ({"quant_method": ["fp8"]}, r"quant_method is \['fp8'\]; allowed"),
        ("fp8", "quantization_config is 'fp8'; allowed: a mapping, or null"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme is 'static'; allowed: 'dynamic'"),
        *(
            (FP8 | {"weight_block_size": size}, r"weight_block_size is .*; allowed: .*, such as \[128, 128\]")
            for size in (None, 128, [128], [128, 0], [128, 128, 1], "12", [1.5, 2])
        ),
        ({"quant_method": "fp8"}, "weight_block_size is None; allowed"),
        (FP8 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is .*; allowed: null"),
        (FP8 | {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo is 'FP8'; allowed: null"),
    ],
)
def test_other_settings_are_refused(folder: Path, quantization: Any, reason: str) -> None:
    edit_config(folder, quantization_config=quantization)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        read_model_config(folder)
    assert "\n" not in str(caught.value)


def test_modelopt_is_named_even_if_config_json_is_silent(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    edit_config(folder, quantization_config=None)
    with pytest.raises(UnsupportedModelError, match="quant_method is 'modelopt'; allowed"):
        read_model_config(folder)


Tensors = dict[str, Tensor]
WRONG: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no scale": (lambda tensors: tensors.pop(f"{DOWN}_scale_inv"), rf"; missing: {DOWN}_scale_inv$"),
    "no weight": (lambda tensors: tensors.pop(DOWN), rf"; missing: {DOWN}; unexpected: {DOWN}_scale_inv$"),
    "a scale of a plain weight": (
        lambda tensors: tensors.update({f"{LAYER}.self_attn.q_proj.weight_scale_inv": torch.ones(2, 4)}),
        rf"; unexpected: {LAYER}\.self_attn\.q_proj\.weight_scale_inv$",
    ),
    "a scale per tensor": (
        lambda tensors: tensors.update({f"{DOWN}_scale_inv": torch.tensor(1.0)}),
        rf"; wrong shape: {DOWN}_scale_inv is \[\] but should be \[2, 6\]$",
    ),
    "a scale of other blocks": (
        lambda tensors: tensors.update({f"{DOWN}_scale_inv": torch.ones(1, 1)}),
        rf"; wrong shape: {DOWN}_scale_inv is \[1, 1\] but should be \[2, 6\]$",
    ),
    "a scale in E8M0": (
        lambda tensors: tensors.update({f"{DOWN}_scale_inv": torch.ones(2, 6).to(torch.float8_e8m0fnu)}),
        rf"; wrong dtype: {DOWN}_scale_inv is F8_E8M0 but should be F32 or BF16$",
    ),
    "E5M2": (
        lambda tensors: tensors.update({DOWN: tensors[DOWN].float().to(torch.float8_e5m2)}),
        rf"; wrong dtype: {DOWN} is F8_E5M2 but should be F8_E4M3$",
    ),
    "a norm in FP8": (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
        r"; wrong dtype: model\.norm\.weight is F8_E4M3 but should be F32 or BF16 or F16$",
    ),
    "a scale of KV": (
        lambda tensors: tensors.update({f"{LAYER}.self_attn.k_proj.k_scale": torch.ones(1)}),
        rf"; unexpected: {LAYER}\.self_attn\.k_proj\.k_scale$",
    ),
}


@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG.keys())
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Callable[[Tensors], Any], reason: str) -> None:
    tensors = tensors_in(folder)
    change(tensors)
    save(folder, tensors)
    for check in (check_weights, load_model):
        with pytest.raises(CheckpointError, match=reason) as caught:
            check(folder)
        assert "\n" not in str(caught.value)


def test_fp8_without_quantization_config_is_refused_before_the_start(folder: Path) -> None:
    edit_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"unexpected: .*wrong dtype: .* is F8_E4M3 but should be F32 or BF16"):
        check_weights(folder)
