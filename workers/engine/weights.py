"""Model weights: a rank's shards of the tensors in a folder's safetensors files, or random weights.

``python -m workers.engine.weights FOLDER`` checks a folder. If it cannot be loaded, the command prints why and exits
with code 2.
"""

import logging
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from cluster.spec.errors import UserError
from cluster.spec.memory import GIB
from workers.device import CPU, Device
from workers.engine.checkpoint_files import CheckpointError, StoredTensor, open_reader, shortened, stored_tensors
from workers.engine.fp8_weights import keep_fp8
from workers.layers.shard import ShardedLayer, WeightShard
from workers.models.decoder import DecoderModel
from workers.models.interface import DecoderConfig
from workers.models.registry import read_model_config
from workers.parallel.model_groups import ModelGroups
from workers.quant.interface import StoredWeight, TensorSpec

_log = logging.getLogger(__name__)


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: Device = CPU,
    groups: ModelGroups | None = None,
) -> DecoderModel:
    """Load a rank's part of the model in a folder, one tensor at a time. Weights in FP8 are dequantized, unless the
    device multiplies in FP8.

    Args:
        dtype: number format. None selects the checkpoint's own.
        groups: ranks among which the model is divided. If None, this rank loads all of it.

    Raises:
        UnsupportedModelError: the engine cannot run the model, or cannot divide it among these ranks.
        CheckpointError: tensors are missing, unexpected or have the wrong shape or dtype. The message names them.
    """
    start_s = time.monotonic()
    config = read_model_config(folder)
    dtype = dtype or torch_dtype(config.dtype)
    with torch.device("meta"):
        model = DecoderModel(config, dtype=dtype, device=device, groups=groups)
    stored = stored_tensors(folder)
    weights = _checked_weights(model, config, folder, stored)
    if device.multiplies_fp8:
        keep_fp8(model, weights)
    allocate(model, dtype, device)
    _fill(model, config, stored, weights)
    num_bytes = sum(shard.target.nbytes for shard in model.weights().values())
    in_fp8 = f", {model.fp8_bytes / GIB:.3g} GiB of them in FP8" if model.fp8_bytes else ""
    _log.info("weights are stored as %s and kept in %s", config.weight_format, str(dtype).removeprefix("torch."))
    _log.info("loaded %.3g GiB of weights%s in %.3g s", num_bytes / GIB, in_fp8, time.monotonic() - start_s)
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


def _checked_weights(
    model: DecoderModel, config: DecoderConfig, folder: Path, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredWeight]:
    """Return how the checkpoint stores each weight of a rank. Raises CheckpointError if its tensors do not fit."""
    weights = _stored_weights(config, model.weights(), stored)
    expected = _tensors_of(weights)
    # Other ranks' weights are built only if needed.
    if others := _others(config, expected, stored):
        others -= _tensors_of(_stored_weights(config, _whole_model(config).weights(), stored)).keys()
    _check_fit(folder, expected, stored, unexpected=others)
    return weights


def _fill(
    model: DecoderModel,
    config: DecoderConfig,
    stored: Mapping[str, StoredTensor],
    weights: Mapping[str, StoredWeight],
) -> None:
    shards, copies = model.weights(), config.copies
    for file in sorted({tensor.file for tensor in stored.values()}):
        with open_reader(stored, file) as read:
            for name, shard in shards.items():
                if stored[name].file == file:
                    weights[name].load(shard.index, shard.cleared(), read)
    for copy, original in copies.items():
        if copy in stored and original in shards:
            _check_copy(copy, stored, original, shards[original])


def check_weights(folder: Path) -> None:
    """Check that the tensors in a folder are those of its config.json, without reading their values.

    Raises:
        UnsupportedModelError: the engine cannot run the model.
        CheckpointError: files are missing or damaged, or tensors are missing, unexpected or have the wrong shape or
            dtype.
    """
    config = read_model_config(folder)
    stored = stored_tensors(folder)
    expected = _tensors_of(_stored_weights(config, _whole_model(config).weights(), stored))
    _check_fit(folder, expected, stored, unexpected=_others(config, expected, stored))


def _stored_weights(
    config: DecoderConfig, shards: Mapping[str, WeightShard], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredWeight]:
    """Return how the checkpoint stores each weight."""
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    return {name: config.weight_format.weight(name, shard.whole, dtypes.get(name)) for name, shard in shards.items()}


def _tensors_of(weights: Mapping[str, StoredWeight]) -> dict[str, TensorSpec]:
    return {name: spec for weight in weights.values() for name, spec in weight.tensors().items()}


def _others(config: DecoderConfig, expected: Collection[str], stored: Collection[str]) -> set[str]:
    """Return the stored tensors that are not expected and do not belong to every checkpoint of the kind."""
    names = set(stored) - set(expected)
    return {name for name in names if name not in config.copies and not config.is_ignored(name)}


def _whole_model(config: DecoderConfig) -> DecoderModel:
    """Return the model of all ranks, without memory for its weights."""
    with torch.device("meta"):
        return DecoderModel(config, dtype=torch.float32, device=CPU)


def _check_fit(
    folder: Path, expected: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor], unexpected: set[str]
) -> None:
    both = [(name, stored[name], spec) for name, spec in expected.items() if name in stored]
    found: dict[str, Collection[str]] = {
        "missing": expected.keys() - stored,
        "unexpected": unexpected,
        "wrong shape": [
            f"{name} is {list(tensor.shape)} but should be {list(spec.shape)}"
            for name, tensor, spec in both
            if tensor.shape != spec.shape
        ],
        "wrong dtype": [
            f"{name} is {tensor.dtype} but should be {' or '.join(spec.dtypes)}"
            for name, tensor, spec in both
            if tensor.dtype not in spec.dtypes
        ],
    }
    problems = [f"{kind}: {shortened(names)}" for kind, names in found.items() if names]
    if problems:
        raise CheckpointError(f"the tensors in {folder} do not match its config.json; {'; '.join(problems)}")


def _check_copy(name: str, stored: Mapping[str, StoredTensor], original: str, shard: WeightShard) -> None:
    file = stored[name].file
    with open_reader(stored, file) as read:
        copy = read(name, shard.index).to(shard.plain)
        if stored[name].shape != shard.whole or not torch.equal(copy, shard.plain[: len(copy)]):
            raise CheckpointError(f"config.json ties {name} to {original}, but {file} has different values")


def random_model(
    config: DecoderConfig, dtype: torch.dtype, device: Device, groups: ModelGroups | None = None
) -> DecoderModel:
    """Build an unpacked model with norm weights of 1 and other weights random. Ranks that hold equal parts of it get
    the same weights.

    Products keep the scale of their inputs, so that attention is selective at any width.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model = DecoderModel(config, dtype=dtype, device=device, groups=groups)
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
