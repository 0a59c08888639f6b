"""Checkpoints in FP8 blocks, written as DeepSeek-V3 and Qwen3 publish them.

transformers writes this format on GPUs only, unless its check is patched; it leaves out weights that blocks do not
divide, and cannot read the scales that it writes for experts.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.quantizers import quantizer_finegrained_fp8

Block = tuple[int, int]
FP8 = torch.float8_e4m3fn


def per_element(scales: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """Return each element's fp32 scale, by its definition."""
    rows, columns = (torch.arange(size) // of_block for size, of_block in zip(shape, block, strict=True))
    return scales.float()[rows][:, columns]


def dequantized(weight: Tensor, scales: Tensor, block: Block) -> Tensor:
    return weight.float() * per_element(scales, tuple(weight.shape), block)


def quantized(weight: Tensor, block: Block, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return a weight in FP8 and its scales. The largest element of each block becomes FP8's largest number."""
    strips = [torch.split(strip, block[1], dim=1) for strip in torch.split(weight.float(), block[0])]
    largest = torch.stack([torch.stack([part.abs().max() for part in strip]) for strip in strips])
    scales = (largest / torch.finfo(FP8).max).to(scale_dtype)
    return (weight.float() / per_element(scales, tuple(weight.shape), block)).to(FP8), scales


def to_fp8_blocks(
    folder: Path,
    block: Block,
    *,
    kept: Collection[str] = (),
    scale_dtype: torch.dtype = torch.float32,
    num_files: int = 1,
) -> Path:
    """Rewrite all projections of a checkpoint in FP8, except those of the modules in ``kept``.

    Tensors are dealt to the files in turn, so that with several files, scales are in other files than their weights.
    """
    tensors = tensors_in(folder)
    for name in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
        if name.removesuffix(".weight") not in kept:
            tensors[name], tensors[f"{name}_scale_inv"] = quantized(tensors[name], block, scale_dtype)
    save(folder, tensors, num_files)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block)}
    edit_config(folder, quantization_config={**settings, "modules_to_not_convert": list(kept)})
    return folder


def to_plain(folder: Path, target: Path, block: Block) -> Path:
    """Write a checkpoint in FP8 blocks as a plain one with the same values in fp32."""
    stored = tensors_in(folder)
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    edit_config(target, quantization_config=None)
    scales = {name: f"{name}_scale_inv" for name in stored if f"{name}_scale_inv" in stored}
    plain = {name: dequantized(stored[name], stored[scale], block) for name, scale in scales.items()}
    save(target, {name: plain.get(name, tensor) for name, tensor in stored.items() if name not in scales.values()})
    return target


def quantized_by_transformers(folder: Path, target: Path, block: Block) -> Path:
    """Write a checkpoint with transformers' own quantizer."""
    quantizer = quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    with patch.object(quantizer, "validate_environment", lambda *_, **__: None):
        config = FineGrainedFP8Config(weight_block_size=block)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
        model.save_pretrained(target)
    return target


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save(folder: Path, tensors: Mapping[str, Tensor], num_files: int = 1) -> None:
    """Replace all tensors of a folder."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    if num_files == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    files = {name: f"model-{turn % num_files}.safetensors" for turn, name in enumerate(sorted(tensors))}
    for file_name in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file_name}
        save_file(part, folder / file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a checkpoint in FP8 blocks with transformers, dequantized. Blocks must divide every weight.

    transformers insists on accelerate, which it does not use for this.
    """
    with patch.object(quantizer_finegrained_fp8, "is_accelerate_available", return_value=True):
        config = FineGrainedFP8Config(dequantize=True)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)
    return model
