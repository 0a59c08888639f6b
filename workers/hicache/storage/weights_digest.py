"""Digest of a checkpoint's weights and configuration."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from workers.hicache.storage.private_folder import open_at_once

_NOT_WEIGHTS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys of config.json that do not affect KV or are compared elsewhere."""
_SHA256 = re.compile("[0-9a-f]{64}")


def weights_digest(folder: Path, known: Path, products: str = "") -> str:
    """Return a digest of a folder's configuration and safetensors files. It is the same on every machine.

    The folder ``known`` caches file digests, so each file is read only once until it changes. ``products`` names the
    format of matrix products if it is not the model's dtype, since other products give other KV.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    facts = {name: value for name, value in config.items() if name not in _NOT_WEIGHTS}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    # The first rank on a machine reads the files; the others wait for its digests.
    with _locked(known), ThreadPoolExecutor(os.cpu_count()) as threads:
        for sha256 in threads.map(partial(_sha256, known=known), sorted(folder.glob("*.safetensors"))):
            digest.update(bytes.fromhex(sha256))
    digest.update(products.encode())
    return digest.hexdigest()


def _sha256(path: Path, known: Path) -> str:
    real = path.resolve()
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name  # Hugging Face's cache names large files by their digests
    stat = real.stat()
    facts = (str(real), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    note = known / hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError), open(note, opener=open_at_once) as file:
        if _SHA256.fullmatch(noted := file.read()):
            return noted
    with real.open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    with contextlib.suppress(OSError):
        note.unlink(missing_ok=True)
        with open(note, "x", opener=open_at_once) as file:
            file.write(found)
    return found


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. If the folder is read-only, hold no lock: every rank then reads the files itself."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder / ".lock", "a", opener=open_at_once))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
