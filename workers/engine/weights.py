"""Checkpoint to model: copies a folder's safetensors in, one tensor at a time."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.spec.errors import UserError
from workers.layers.linear import FusedLinear
from workers.models.config import ModelConfig
from workers.models.decoder import DecoderModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OUTPUT_TABLE = "lm_head.weight"
NAMES_SHOWN = 8


class CheckpointError(UserError):
    """A checkpoint's files are missing, damaged, or do not fit its config.json. The message names what does not fit."""


def load_model(folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> DecoderModel:
    """Build the model of `folder` and fill it; dtype None keeps the checkpoint's own, device None is the CPU.

    Peak memory is the model and one tensor. Raises UnsupportedModelError, or CheckpointError naming tensors that are
    missing, unexpected or of another shape.
    """
    config = ModelConfig.from_folder(folder)
    dtype = dtype or torch_dtype(config.dtype)
    device = device or torch.device("cpu")
    with torch.device("meta"):
        model = DecoderModel(config, dtype=dtype, device=device)
    model.to(dtype).to_empty(device=device)
    _fill(model, folder)
    return model


def torch_dtype(name: str) -> torch.dtype:
    """'bfloat16' -> torch.bfloat16."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype; examples: float32, bfloat16")
    return dtype


def checkpoint_tensors(model: DecoderModel) -> dict[str, Tensor]:
    """Every tensor the checkpoint must hold, by its name there, as a view of where it goes in the model."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        root = "" if path == "lm_head" else "model."
        if isinstance(module, FusedLinear):
            parent = path.rpartition(".")[0]
            tensors |= {f"{root}{parent}.{name}": part for name, part in module.named_parts()}
        else:
            named = module.named_parameters(recurse=False)
            tensors |= {f"{root}{path}.{name}": parameter for name, parameter in named}
    return tensors


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies on disk, known without reading it."""

    file: Path
    shape: tuple[int, ...]


def _fill(model: DecoderModel, folder: Path) -> None:
    wanted, stored = checkpoint_tensors(model), _stored_tensors(folder)
    redundant = {name for name in stored if _is_redundant(name, model.config)}
    _check_fit(folder, wanted, {name: place for name, place in stored.items() if name not in redundant})
    for file in sorted({place.file for place in stored.values()}):
        with _opened(file) as tensors:
            for name in wanted:
                if stored[name].file == file:
                    wanted[name].copy_(tensors.get_tensor(name))
    if OUTPUT_TABLE in redundant:
        _check_tied(model, stored[OUTPUT_TABLE])


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for file in _weight_files(folder):
        with _opened(file) as tensors:
            # `tensors` is a handle of the safetensors library, not a mapping.
            for name in tensors.keys():  # noqa: SIM118
                stored[name] = _Stored(file, tuple(tensors.get_slice(name).get_shape()))
    return stored


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
    absent = [shard for shard in shards if not (folder / shard).exists()]
    if absent:
        raise CheckpointError(f"{folder} lacks files that {INDEX_FILE} names: {_shortened(absent)}")
    return [folder / shard for shard in shards]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Rotary frequencies, which old checkpoints store, and the output table where it is the input table."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == OUTPUT_TABLE)


def _check_fit(folder: Path, wanted: Mapping[str, Tensor], stored: Mapping[str, _Stored]) -> None:
    misshapen = [
        f"{name} is {list(stored[name].shape)} but should be {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    ]
    found = {"missing": wanted.keys() - stored, "unexpected": stored.keys() - wanted, "wrong shape": misshapen}
    problems = [f"{kind}: {_shortened(names)}" for kind, names in found.items() if names]
    if problems:
        raise CheckpointError(f"the tensors in {folder} do not fit its config.json; {'; '.join(problems)}")


def _check_tied(model: DecoderModel, place: _Stored) -> None:
    table = model.embed_tokens.weight
    with _opened(place.file) as tensors:
        if not torch.equal(tensors.get_tensor(OUTPUT_TABLE).to(table), table):
            raise CheckpointError(f"config.json ties the embeddings, but {place.file} holds another {OUTPUT_TABLE}")


def _shortened(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
