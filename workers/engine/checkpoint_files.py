"""Files of a checkpoint: which tensors they contain, and reading parts of them."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.model_folder import is_lfs_pointer
from cluster.spec.errors import UserError
from cluster.spec.memory import GIB
from workers.quant.interface import Index, Read

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAMES_SHOWN = 8


class CheckpointError(UserError):
    """Checkpoint whose files are missing, damaged, or inconsistent with config.json. The message names the files."""


@dataclass(frozen=True)
class StoredTensor:
    """Location, shape and number format of a tensor on disk."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Number format, by safetensors' name."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List a checkpoint's tensors without reading them, except those without elements. Raises CheckpointError."""
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        with _open_tensors(file) as tensors:
            # `tensors` is a handle of the safetensors library, not a mapping.
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_slice(name)
                if 0 not in (shape := tuple(tensor.get_shape())):
                    stored[name] = StoredTensor(file, shape, tensor.get_dtype())
    return stored


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        others = sorted(path.name for pattern in ("*.bin", "*.gguf") for path in folder.glob(pattern))
        found = f"; found: {shortened(others)}, which Baton does not read" if others else ""
        raise CheckpointError(f"{folder} contains no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{found}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        present = {path.name for path in folder.iterdir()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
    # Names that contain a directory are not allowed.
    absent = [str(shard) for shard in shards if shard not in present]
    if absent:
        raise CheckpointError(f"{folder} lacks files listed in {INDEX_FILE}: {shortened(absent)}")
    return [folder / shard for shard in shards]


@contextmanager
def _open_tensors(file: Path) -> Iterator[Any]:
    try:
        # safetensors says of any file that it cannot open that there is none.
        is_pointer = is_lfs_pointer(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if is_pointer:
        raise CheckpointError(f"{file} is a pointer of Git LFS, not the weights; `git lfs pull` fetches them")
    try:
        with _mapped(file) as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _mapped(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except RuntimeError as error:
        # Linux does not map a file for torch that is larger than the machine's memory.
        size = file.stat().st_size / GIB
        raise CheckpointError(
            f"{file} ({size:.3g} GiB) cannot be mapped into memory; "
            'save_pretrained(max_shard_size="5GB") writes smaller files'
        ) from error


@contextmanager
def open_reader(stored: Mapping[str, StoredTensor], file: Path) -> Iterator[Read]:
    """Open a file to read its tensors. A tensor in another file can be read, too, but opens that file each time."""
    with _open_tensors(file) as tensors:

        def read(name: str, index: Index) -> Tensor:
            if stored[name].file == file:
                part: Tensor = tensors.get_slice(name)[index]
                return part
            with open_reader(stored, stored[name].file) as read_other:
                return read_other(name, index)

        yield read


def shortened(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
