"""Checkpoint to model: copies a rank's part of a folder's safetensors in, one tensor at a time."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cluster.spec.errors import UserError
from workers.layers.cut import StoredPart
from workers.layers.embedding import Embedding
from workers.layers.expert_router import ExpertRouter
from workers.layers.experts import Experts
from workers.layers.linear import FusedLinear, SummedLinear
from workers.layers.rms_norm import RMSNorm
from workers.models.config import ModelConfig
from workers.models.decoder import DecoderModel
from workers.parallel.model_groups import ModelGroups

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INPUT_TABLE = "model.embed_tokens.weight"
OUTPUT_TABLE = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
NAMES_SHOWN = 8
_OF_FIRST_STAGE = {INPUT_TABLE}
_OF_LAST_STAGE = {OUTPUT_TABLE, FINAL_NORM}
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


class CheckpointError(UserError):
    """A checkpoint's files are missing, damaged, or do not fit its config.json. The message names what does not fit."""


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    groups: ModelGroups | None = None,
) -> DecoderModel:
    """Build the model of `folder` and fill it; dtype None keeps the checkpoint's own, device None is the CPU.

    A rank of `groups` reads and holds only its part; peak memory is that part and one tensor of it.

    Raises:
        UnsupportedModelError: the engine cannot run the model, or not on so many ranks.
        CheckpointError: tensors are missing, unexpected or of another shape; names them.
    """
    config = ModelConfig.from_folder(folder)
    dtype = dtype or torch_dtype(config.dtype)
    device = device or torch.device("cpu")
    with torch.device("meta"):
        model = DecoderModel(config, dtype=dtype, device=device, groups=groups)
    allocate(model, dtype, device)
    _fill(model, folder)
    model.pack()
    return model


def allocate(model: DecoderModel, dtype: torch.dtype, device: torch.device) -> None:
    """Give a model that was made without memory its tensors, not yet filled.

    Not by ``to_empty``: on its way from shapes to memory torch imports sympy, which takes a second.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))


def torch_dtype(name: str) -> torch.dtype:
    """'bfloat16' -> torch.bfloat16."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype; examples: float32, bfloat16")
    return dtype


def stored_parts(model: DecoderModel) -> dict[str, StoredPart]:
    """Every tensor the checkpoint must hold, by its name there, with the part of it that goes into the model."""
    parts: dict[str, StoredPart] = {}
    for path, module in model.named_modules():
        if isinstance(module, FusedLinear):
            # Its projections stand beside each other in the checkpoint, in the place of the fused one.
            path = path.rpartition(".")[0]
        if isinstance(module, FusedLinear | SummedLinear | Embedding | RMSNorm | ExpertRouter | Experts):
            root = "" if path == "lm_head" else "model."
            stored_path = _stored_path(path, model.config)
            parts |= {f"{root}{stored_path}.{name}": part for name, part in module.stored_parts()}
    return parts


def _stored_path(path: str, config: ModelConfig) -> str:
    """What the checkpoint calls a module; only layers with experts have names of their own there."""
    layer = _LAYER.match(path)
    moe = config.moe_of(int(layer[1])) if layer else None
    return path.replace(".mlp", f".{moe.names.block}") if moe else path


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies on disk, known without reading it."""

    file: Path
    shape: tuple[int, ...]


def _fill(model: DecoderModel, folder: Path) -> None:
    wanted, stored = stored_parts(model), stored_tensors(folder)
    redundant = {name for name in stored if _is_redundant(name, model.config)}
    others = {name for name in stored.keys() - wanted if _is_elsewhere(name, model)}
    _check_fit(folder, wanted, {name: place for name, place in stored.items() if name not in redundant | others})
    for file in sorted({place.file for place in stored.values()}):
        with _opened(file) as tensors:
            for name, part in wanted.items():
                if stored[name].file == file:
                    part.fill(tensors.get_slice(name)[part.index])
    if OUTPUT_TABLE in redundant and model.is_last:
        _check_tied(wanted[INPUT_TABLE], stored[OUTPUT_TABLE])


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, without reading it. Raises CheckpointError."""
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        with _opened(file) as tensors:
            # `tensors` is a handle of the safetensors library, not a mapping.
            for name in tensors.keys():  # noqa: SIM118
                stored[name] = StoredTensor(file, tuple(tensors.get_slice(name).get_shape()))
    return stored


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        present = {path.name for path in folder.iterdir()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
    # A name with a path in it is none of the folder's.
    absent = [str(shard) for shard in shards if shard not in present]
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


def _is_elsewhere(name: str, model: DecoderModel) -> bool:
    """Whether a tensor that this rank does not hold is of another stage, or of an expert on another rank."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    if layer is None:
        return (name in _OF_FIRST_STAGE and not model.is_first) or (name in _OF_LAST_STAGE and not model.is_last)
    moe = model.config.moe_of(int(layer[1]))
    is_of_expert = moe is not None and expert is not None and int(expert[1]) < moe.num_experts
    return is_of_expert or (layer[1] not in model.layers and int(layer[1]) < model.num_layers)


def _check_fit(folder: Path, wanted: Mapping[str, StoredPart], stored: Mapping[str, StoredTensor]) -> None:
    misshapen = [
        f"{name} is {list(stored[name].shape)} but should be {list(part.whole)}"
        for name, part in wanted.items()
        if name in stored and stored[name].shape != part.whole
    ]
    found = {"missing": wanted.keys() - stored, "unexpected": stored.keys() - wanted, "wrong shape": misshapen}
    problems = [f"{kind}: {_shortened(names)}" for kind, names in found.items() if names]
    if problems:
        raise CheckpointError(f"the tensors in {folder} do not fit its config.json; {'; '.join(problems)}")


def _check_tied(table: StoredPart, copy: StoredTensor) -> None:
    with _opened(copy.file) as tensors:
        stored = tensors.get_slice(OUTPUT_TABLE)[table.index].to(table.target)
        if copy.shape != table.whole or not torch.equal(stored, table.target[: len(stored)]):
            raise CheckpointError(f"config.json ties the embeddings, but {copy.file} holds another {OUTPUT_TABLE}")


def _shortened(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
