"""Model weights: a rank's shards of the tensors in a folder's safetensors files, or random weights.

``python -m workers.engine.weights FOLDER`` checks a folder. If it cannot be loaded, the command prints why and exits
with code 2.
"""

import json
import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cluster.spec.errors import UserError
from cluster.spec.memory import GIB
from workers.device import CPU, Device
from workers.layers.shard import ShardedLayer, WeightShard
from workers.models.decoder import DecoderModel
from workers.models.interface import DecoderConfig
from workers.models.registry import read_model_config
from workers.parallel.collectives import ModelGroups

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAMES_SHOWN = 8

_log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """Checkpoint whose files are missing, damaged, or inconsistent with config.json. The message names the files."""


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: Device = CPU,
    groups: ModelGroups | None = None,
) -> DecoderModel:
    """Load a rank's part of the model in a folder, one tensor at a time.

    Args:
        dtype: number format. None selects the checkpoint's own.
        groups: ranks among which the model is divided. If None, this rank loads all of it.

    Raises:
        UnsupportedModelError: the engine cannot run the model, or cannot divide it among these ranks.
        CheckpointError: tensors are missing, unexpected or have the wrong shape. The message names them.
    """
    start_s = time.monotonic()
    config = read_model_config(folder)
    dtype = dtype or torch_dtype(config.dtype)
    with torch.device("meta"):
        model = DecoderModel(config, dtype=dtype, device=device, groups=groups)
    allocate(model, dtype, device)
    _fill(model, config, folder)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    model.pack()
    _log.info("loaded %.3g GiB of weights in %.3g s", num_bytes / GIB, time.monotonic() - start_s)
    return model


def allocate(model: DecoderModel, dtype: torch.dtype, device: Device) -> None:
    """Allocate memory for a model that was built on the meta device.

    Unlike ``to_empty``, this does not make torch import sympy, which takes a second.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_wide = isinstance(module, ShardedLayer) and name in module.wide
            memory = torch.empty(parameter.shape, dtype=torch.float32 if is_wide else dtype, device=device.torch_device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True)
class StoredTensor:
    """File and shape of a tensor on disk."""

    file: Path
    shape: tuple[int, ...]


def _fill(model: DecoderModel, config: DecoderConfig, folder: Path) -> None:
    expected, stored, copies = model.weights(), stored_tensors(folder), config.copies
    # Other ranks' weights are built only if needed.
    if others := _others(config, expected, stored):
        others -= _whole_model(config).weights().keys()
    _check_fit(folder, expected, stored, unexpected=others)
    for file in sorted({tensor.file for tensor in stored.values()}):
        with _open_tensors(file) as tensors:
            for name, part in expected.items():
                if stored[name].file == file:
                    part.fill(tensors.get_slice(name)[part.index])
    for copy, original in copies.items():
        if copy in stored and original in expected:
            _check_copy(copy, stored[copy], original, expected[original])


def check_weights(folder: Path) -> None:
    """Check that the tensors in a folder are those of its config.json, without reading their values.

    Raises:
        UnsupportedModelError: the engine cannot run the model.
        CheckpointError: files are missing or damaged, or tensors are missing, unexpected or have the wrong shape.
    """
    config = read_model_config(folder)
    expected, stored = _whole_model(config).weights(), stored_tensors(folder)
    _check_fit(folder, expected, stored, unexpected=_others(config, expected, stored))


def _others(config: DecoderConfig, expected: Collection[str], stored: Collection[str]) -> set[str]:
    """Return the stored tensors that are not expected and do not belong to every checkpoint of the kind."""
    names = set(stored) - set(expected)
    return {name for name in names if name not in config.copies and not config.is_ignored(name)}


def _whole_model(config: DecoderConfig) -> DecoderModel:
    """Return the model of all ranks, without memory for its weights."""
    with torch.device("meta"):
        return DecoderModel(config, dtype=torch.float32, device=CPU)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List a checkpoint's tensors without reading them. Raises CheckpointError."""
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        with _open_tensors(file) as tensors:
            # `tensors` is a handle of the safetensors library, not a mapping.
            for name in tensors.keys():  # noqa: SIM118
                stored[name] = StoredTensor(file, tuple(tensors.get_slice(name).get_shape()))
    return stored


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f"; found: {_shortened(others)}, which Baton does not read" if others else ""
        raise CheckpointError(f"{folder} contains no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{found}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        present = {path.name for path in folder.iterdir()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
    # Names that contain a directory are not allowed.
    absent = [str(shard) for shard in shards if shard not in present]
    if absent:
        raise CheckpointError(f"{folder} lacks files listed in {INDEX_FILE}: {_shortened(absent)}")
    return [folder / shard for shard in shards]


@contextmanager
def _open_tensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _check_fit(
    folder: Path, expected: Mapping[str, WeightShard], stored: Mapping[str, StoredTensor], unexpected: set[str]
) -> None:
    misshapen = [
        f"{name} is {list(stored[name].shape)} but should be {list(part.whole)}"
        for name, part in expected.items()
        if name in stored and stored[name].shape != part.whole
    ]
    found = {"missing": expected.keys() - stored, "unexpected": unexpected, "wrong shape": misshapen}
    problems = [f"{kind}: {_shortened(names)}" for kind, names in found.items() if names]
    if problems:
        raise CheckpointError(f"the tensors in {folder} do not match its config.json; {'; '.join(problems)}")


def _check_copy(name: str, copy: StoredTensor, original: str, part: WeightShard) -> None:
    with _open_tensors(copy.file) as tensors:
        stored = tensors.get_slice(name)[part.index].to(part.target)
        if copy.shape != part.whole or not torch.equal(stored, part.target[: len(stored)]):
            raise CheckpointError(f"config.json ties {name} to {original}, but {copy.file} has different values")


def _shortened(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def random_model(config: DecoderConfig, dtype: torch.dtype, device: Device) -> DecoderModel:
    """Build an unpacked model with norm weights of 1 and other weights random, but the same in every process.

    Products keep the scale of their inputs, so that attention is selective at any width.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model = DecoderModel(config, dtype=dtype, device=device)
    allocate(model, dtype, device)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.fill_(1)
    return model


def main() -> None:
    try:
        check_weights(Path(sys.argv[1]))
    except UserError as error:
        print(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
