"""Tells the weights of two checkpoints apart without reading all of them."""

import hashlib
import json
from pathlib import Path
from typing import Any

_SAMPLE_BYTES = 4096
_NOT_WEIGHTS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Of config.json: what says nothing about the KV of a prompt, or is told apart elsewhere."""


def weights_digest(folder: Path) -> str:
    """Of the configuration, and of the beginning and the middle of every tensor in a folder of safetensors files.

    Weights that were trained further differ nearly everywhere, so that this tells them apart; equal folders have equal
    digests on every machine.
    """
    digest = hashlib.blake2b(digest_size=16)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    facts = {name: value for name, value in config.items() if name not in _NOT_WEIGHTS}
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        _add_samples(digest, path)
    return digest.hexdigest()


def _add_samples(digest: "hashlib.blake2b", path: Path) -> None:
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        header = file.read(header_len)
        digest.update(header)
        for name, tensor in json.loads(header).items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            for offset in (start, (start + end) // 2):
                file.seek(8 + header_len + offset)
                digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
