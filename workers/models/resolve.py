"""Location of a model's files on this machine. Does not import torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from cluster.spec.env import CACHE_DIR
from cluster.spec.errors import ConfigError, Problem, UserError
from workers.models.recall import VERSION, build_recall_checkpoint
from workers.models.recall_weights import BUILT_IN, Variant

DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt", "encoding/*.py", "tokenization_*.py")
"""Patterns that match a repository's files except weights. Texts in Python code are read, and the code is never run."""
EVERYTHING = (*DESCRIPTION, "*.safetensors")
_OTHER_FORMS = ("consolidated*", "original/*")
"""Patterns of files that have the same weights in their publisher's own form."""


def resolve_model(path: str, files: Sequence[str] = EVERYTHING) -> Path:
    """Return a model's folder. Build a built-in model or download a repository first if necessary.

    Args:
        path: a built-in model's name, a folder or a Hugging Face repository.
        files: patterns of the files to download.

    Raises:
        UserError: the path is none of these, the repository cannot be fetched, or the folder for built-in models
            cannot be written.
    """
    if path in BUILT_IN:
        folder = CACHE_DIR.get() / f"{path}-{VERSION}"
        try:
            build_recall_checkpoint(folder, variant=Variant(path))
        except OSError as error:
            where = f"{folder.parent}: {error.strerror or error}; allowed: a writable folder with free space"
            raise UserError(f"BATON_CACHE_DIR: cannot write to {where}") from error
        return folder
    return local_folder(path) or _download(path, files)


def local_folder(path: str) -> Path | None:
    """Return the local folder of a path; None for a Hugging Face repository.

    Raises:
        ConfigError: the path is neither.
    """
    # Unlike Path.expanduser(), this does not fail for an unknown account.
    folder = Path(os.path.expanduser(path))  # noqa: PTH111
    if folder.is_dir():
        return folder
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        allowed = f"{', '.join(BUILT_IN)}, a local folder, a Hugging Face repository like 'owner/name'"
        raise ConfigError([Problem("model.path", f"got {path!r}, which is not a folder; allowed: {allowed}")])
    return None


def _download(repository: str, files: Sequence[str]) -> Path:
    # A local folder does not need this library, which is slow to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=[*files], ignore_patterns=[*_OTHER_FORMS]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        offline = "offline? " if isinstance(error, LocalEntryNotFoundError) else ""
        raise UserError(
            f"model {repository!r} is not a local folder and cannot be fetched from Hugging Face ({offline}{reason})"
        ) from error
